//! A sample: tokens, the tokens after them, and what the ends of documents do to loss, positions and attention.
//!
//! Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py (its attention mask is here the boundaries `cu_seqlens`).

use crate::failure::{Failure, Result};

/// What an end-of-document token inside a sample does. The token itself still belongs to the document it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Boundaries {
    /// The token.
    pub end: i64,
    /// Positions count from 0 again after it (`reset_position_ids`).
    pub reset_positions: bool,
    /// Nothing after it sees anything up to it (`reset_attention_mask`).
    pub reset_attention: bool,
    /// No loss where it is the input (`eod_mask_loss`).
    pub mask_loss: bool,
}

/// One sample of a GPT data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Inputs [sequence_length].
    pub tokens: Vec<i32>,
    /// The token after each [sequence_length].
    pub labels: Vec<i32>,
    /// 1 where the loss counts, else 0 [sequence_length].
    pub loss_mask: Vec<f32>,
    /// [sequence_length].
    pub position_ids: Vec<i32>,
    /// Where attention begins afresh [pieces + 1]: first 0, last sequence_length.
    pub cu_seqlens: Vec<i32>,
}

impl Sample {
    /// Makes a sample of text [sequence_length + 1]. Padding becomes token 0, without loss where it is the label.
    pub fn new(text: &[i64], pad: i64, boundaries: &Boundaries) -> Result<Sample> {
        let token = |&token: &i64| match i32::try_from(token) {
            _ if token == pad => Ok(0),
            Ok(token) if token >= 0 => Ok(token),
            _ => Err(Failure::data(format!(
                "the data hold the token {token}; tokens are numbers from 0 to {}",
                i32::MAX
            ))),
        };
        let ids = text.iter().map(token).collect::<Result<Vec<i32>>>()?;
        let len = text.len().saturating_sub(1);
        let (mut loss_mask, mut position_ids, mut cu_seqlens) =
            (Vec::with_capacity(len), Vec::with_capacity(len), vec![0]);
        let mut start = 0;
        for (at, pair) in text.windows(2).enumerate() {
            let ends = pair[0] == boundaries.end;
            loss_mask.push(if pair[1] == pad || boundaries.mask_loss && ends { 0.0 } else { 1.0 });
            position_ids.push((at - start) as i32);
            if ends && boundaries.reset_positions {
                start = at + 1;
            }
            if ends && boundaries.reset_attention && at + 1 < len {
                cu_seqlens.push(at as i32 + 1);
            }
        }
        cu_seqlens.push(len as i32);
        let labels = ids.get(1..).unwrap_or_default().to_vec();
        Ok(Sample { tokens: ids[..len].to_vec(), labels, loss_mask, position_ids, cu_seqlens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Boundaries = Boundaries { end: 9, reset_positions: true, reset_attention: true, mask_loss: true };

    #[test]
    fn ends_of_documents_reset_what_they_are_told_to() {
        let text = [5, 9, 6, 7, 9, 8];
        let sample = Sample::new(&text, -1, &ALL).unwrap();
        assert_eq!((sample.tokens, sample.labels), (vec![5, 9, 6, 7, 9], vec![9, 6, 7, 9, 8]));
        assert_eq!(sample.loss_mask, [1.0, 0.0, 1.0, 1.0, 0.0]);
        assert_eq!(sample.position_ids, [0, 1, 0, 1, 2]);
        // The end at the last place begins no further piece.
        assert_eq!(sample.cu_seqlens, [0, 2, 5]);
        let plain = Sample::new(&text, -1, &Boundaries { end: 9, ..Boundaries::default() }).unwrap();
        assert_eq!((plain.loss_mask, plain.position_ids), (vec![1.0; 5], vec![0, 1, 2, 3, 4]));
        assert_eq!(plain.cu_seqlens, [0, 5]);
    }

    #[test]
    fn padding_becomes_token_0_and_gives_no_loss_as_a_label() {
        let sample = Sample::new(&[5, 6, -1, -1], -1, &ALL).unwrap();
        assert_eq!((sample.tokens, sample.labels), (vec![5, 6, 0], vec![6, 0, 0]));
        assert_eq!(sample.loss_mask, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_token_that_is_none_is_refused() {
        for token in [-2, 1 << 31] {
            let error = Sample::new(&[1, token], -1, &ALL).unwrap_err();
            assert_eq!(
                error.sentence,
                format!("the data hold the token {token}; tokens are numbers from 0 to 2147483647")
            );
        }
    }
}
