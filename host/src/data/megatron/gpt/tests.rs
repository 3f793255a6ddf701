//! Order against a plain restatement of the rules; the stored samples of Megatron-LM are checked by the goldens.

use super::super::tests::written;
use super::super::{Dtype, parts};
use super::*;
use proptest::prelude::*;

fn config(sequence_length: usize, seed: u32) -> GptConfig {
    let (pad, boundaries) = (-1, Boundaries::default());
    GptConfig { sequence_length, seed, pad, boundaries, drop_last_partial_validation: true }
}

/// Sequences with tokens that name their place, so that nothing can be mistaken for anything else.
fn set(lengths: &[usize]) -> (tempfile::TempDir, Arc<IndexedDataset>) {
    let mut next = 0..;
    let documents: Vec<Vec<i64>> = lengths.iter().map(|&len| next.by_ref().take(len).collect()).collect();
    let (folder, set) = written(&documents, Dtype::I32);
    (folder, Arc::new(set))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
    /// Samples are the pieces of the laid-out text, each once; without shuffles they read it from begin to end.
    #[test]
    fn samples_are_the_pieces_of_the_text_laid_end_to_end(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), Just(1), 0..40usize], 1..12),
        length in 1..20usize, samples in prop::option::of(0..60u64), seed: u32, keep: bool,
    ) {
        prop_assume!(lengths.iter().sum::<usize>() > 0);
        let (_folder, set) = set(&lengths);
        let config = GptConfig { drop_last_partial_validation: !keep, ..config(length, seed) };
        let part = if keep { Part::Valid } else { Part::Train };
        let all = 0..set.sequences();
        let data = GptDataset::new(set.clone(), all, samples, part, &config, &Cache::none()).unwrap();
        let mut text: Vec<i64> = Vec::new();
        data.document_index().for_each(|s| text.extend(set.sequence(s as usize).unwrap()));
        // Every epoch holds every sequence once.
        let mut counts = vec![0; lengths.len()];
        data.document_index().for_each(|s| counts[s as usize] += 1);
        prop_assert!(counts.iter().all(|&n| n == data.epochs()));
        // As many epochs as needed, and no more.
        let wanted = samples.map_or(1, |n| n as usize * length + 1);
        prop_assert!(text.len() >= wanted);
        prop_assert!(data.epochs() == 1 || text.len() - lengths.iter().sum::<usize>() < wanted);
        let count = if keep { (text.len() - 1).div_ceil(length) } else { (text.len() - 1) / length };
        prop_assert_eq!(data.len(), count);
        prop_assert!(data.len() as u64 >= samples.unwrap_or(0));
        let mut seen = vec![false; count];
        for i in 0..count {
            let at = data.shuffle_index().nth(i).unwrap() as usize;
            prop_assert!(!std::mem::replace(&mut seen[at], true));
            let mut piece = text[at * length..text.len().min((at + 1) * length + 1)].to_vec();
            piece.resize(length + 1, -1);
            prop_assert_eq!(data.text(i).unwrap(), piece);
        }
    }
}

/// 10 sequences of 10 tokens in samples of 10 give 9 samples an epoch; 80 % of them, cut to a whole number, are 7.
#[test]
fn a_last_epoch_of_less_than_80_percent_is_shuffled_apart() {
    let (_folder, set) = set(&[10; 10]);
    let of = |samples| {
        GptDataset::new(set.clone(), 0..10, Some(samples), Part::Train, &config(10, 7), &Cache::none()).unwrap()
    };
    let apart = |data: &GptDataset| {
        assert_eq!((data.epochs(), data.len()), (2, 19));
        let mut head: Vec<u32> = data.document_index().take(10).collect();
        head.sort();
        let documents = head == (0..10).collect::<Vec<u32>>();
        let samples = data.shuffle_index().take(9).all(|at| at < 9);
        assert_eq!(documents, samples);
        documents
    };
    // The first epoch gives 9 samples: 15 take 6 of the second, 16 take 7.
    assert!(apart(&of(15)));
    assert!(!apart(&of(16)));
    assert_eq!((of(9).epochs(), of(10).epochs()), (1, 2));
}

#[test]
fn a_short_last_sample_is_kept_of_validation_only_if_asked() {
    let (_folder, set) = set(&[7, 0]);
    let of = |part, drop| {
        let config = GptConfig { drop_last_partial_validation: drop, ..config(4, 0) };
        let data = GptDataset::new(set.clone(), 0..2, None, part, &config, &Cache::none()).unwrap();
        (0..data.len()).map(|i| data.sample(i).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((of(Part::Valid, true).len(), of(Part::Train, false).len(), of(Part::Test, false).len()), (1, 1, 1));
    let mut kept = of(Part::Valid, false);
    kept.sort_by_key(|sample| sample.tokens[0]);
    assert_eq!(kept.len(), 2);
    assert_eq!((&kept[1].tokens, &kept[1].labels), (&vec![4, 5, 6, 0], &vec![5, 6, 0, 0]));
    assert_eq!(kept[1].loss_mask, [1.0, 1.0, 0.0, 0.0]);
}

#[test]
fn what_cannot_be_cut_is_refused() {
    let (folder, set) = set(&[3, 4]);
    let refusal = |sequences, samples, length| {
        let error = GptDataset::new(set.clone(), sequences, samples, Part::Valid, &config(length, 0), &Cache::none())
            .unwrap_err();
        error.sentence.replace(&folder.path().display().to_string(), "DIR")
    };
    // Megatron-LM never returns here.
    assert_eq!(refusal(2..2, Some(1), 2), "DIR/set.idx: the validation part has no tokens (sequences 2..2)");
    assert_eq!(refusal(0..3, None, 2), "DIR/set.idx: sequences up to 3 were asked for, but there are 2");
    assert_eq!(refusal(0..2, None, 0), "samples of 0 tokens are not possible; 1 to 2147483646 are");
    let many = u64::MAX / 2;
    assert_eq!(refusal(0..2, Some(many), 4), format!("DIR/set.idx: {many} samples of 4 tokens are too many"));
    let error = refusal(0..2, Some(1 << 60), 2);
    assert!(error.starts_with("no memory for the document index of "), "{error}");
    let data = GptDataset::new(set.clone(), 0..2, None, Part::Train, &config(3, 0), &Cache::none()).unwrap();
    assert!(data.sample(2).unwrap_err().sentence.ends_with("set.idx: there is no sample 2, only 2"));
}

#[test]
fn a_token_that_is_none_is_named_with_its_place() {
    let (_folder, set) = written(&[vec![1, -5, 2]], Dtype::I32);
    let split = parts("1", 1).unwrap()[0].clone().unwrap();
    let data = GptDataset::new(Arc::new(set), split, None, Part::Train, &config(2, 0), &Cache::none()).unwrap();
    let error = data.sample(0).unwrap_err();
    let said = "set.bin: token -5 at place 1 of sequence 0 (byte 4); tokens are numbers from 0";
    assert!(error.sentence.ends_with(said), "{error}");
}
