//! Samples of whole documents: best-fit-decreasing packing.
//!
//! A document of n tokens (its end included) is a sequence of its own that takes n - 1 positions: it reads tokens 0 to
//! n - 2 and is asked for tokens 1 to n - 1. One that is longer than a sample is split into sequences that overlap by the
//! token which the one is asked for and the next begins with, so that every token but the first is predicted once, or
//! left out. Sequences are taken by length, the longest first, those of equal length in an order that the seed decides,
//! and each goes into the sample with the least room that it fits in, a new one if there is none (Johnson 1973, best fit
//! decreasing; Ding et al. 2024 for documents). What is left of a sample is a sequence of padding without weight.

use super::samples::{Row, Samples};
use super::{Corpus, Permutation, stream};
use crate::failure::{Failure, Result};
use crate::recipe::TooLong;
use gantry_kernels::philox::stream_of;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A corpus packed into samples of `length` positions.
#[derive(Clone, Debug)]
pub struct Packed {
    corpus: Arc<Corpus>,
    length: usize,
    seed: u64,
    /// Sequences in the order of the samples: (first token, positions).
    sequences: Vec<(usize, u32)>,
    /// First sequence of each sample, then the number of sequences.
    samples: Vec<usize>,
    most_sequences: usize,
    summary: PackingSummary,
}

/// How well documents fit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PackingSummary {
    pub samples: usize,
    pub sequences: usize,
    /// Positions that are not padding.
    pub positions: usize,
    /// Share of all positions that they are.
    pub efficiency: f64,
    /// Documents longer than a sample, and what became of them.
    pub too_long: usize,
    /// Of these, documents left out.
    pub dropped: usize,
    /// Documents or parts of some of which nothing is learned, left out.
    pub unlearned: usize,
}

impl std::fmt::Display for PackingSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PackingSummary { samples, sequences, efficiency, too_long, dropped, unlearned, .. } = *self;
        write!(f, "{sequences} sequences packed into {samples} samples, {:.2} % of them text", 100.0 * efficiency)?;
        if too_long > 0 {
            let what = if dropped > 0 { "left out" } else { "split" };
            write!(f, "; {too_long} documents longer than a sample were {what}")?;
        }
        if unlearned > 0 {
            write!(f, "; {unlearned} sequences of which nothing is learned were left out")?;
        }
        Ok(())
    }
}

impl Packed {
    pub fn new(corpus: Arc<Corpus>, length: usize, too_long: TooLong, seed: u64) -> Result<Packed> {
        let mut summary = PackingSummary::default();
        let mut pieces: Vec<(usize, u32)> = Vec::new();
        for document in corpus.documents() {
            let positions = document.len() - 1;
            if positions > length {
                summary.too_long += 1;
                if too_long == TooLong::Drop {
                    summary.dropped += 1;
                    continue;
                }
            }
            let begins = (document.start..document.end - 1).step_by(length);
            for begin in begins {
                let positions = length.min(document.end - 1 - begin);
                match (begin + 1..=begin + positions).any(|at| corpus.learned(at)) {
                    true => pieces.push((begin, positions as u32)),
                    false => summary.unlearned += 1,
                }
            }
        }
        if pieces.is_empty() {
            return Err(Failure::data(format!(
                "no document fits into samples of {length} tokens: {} are longer, in {} nothing is learned",
                summary.dropped, summary.unlearned
            ))
            .remedy("raise train.seq_length, or set data.too_long to split"));
        }
        let mut packed = Packed {
            corpus,
            length,
            seed,
            sequences: Vec::with_capacity(pieces.len()),
            samples: vec![0],
            most_sequences: 1,
            summary,
        };
        packed.pack(pieces);
        Ok(packed)
    }

    fn pack(&mut self, pieces: Vec<(usize, u32)>) {
        let order = Permutation::new(pieces.len() as u64, self.seed, stream_of("data.packing"), 0);
        let mut order: Vec<(u32, u64)> =
            (0..pieces.len()).map(|i| order.at(i as u64)).map(|i| (pieces[i as usize].1, i)).collect();
        // Stable: those of one length stay in the permutation's order.
        order.sort_by_key(|&(positions, _)| std::cmp::Reverse(positions));
        let mut bins: Vec<Vec<u64>> = Vec::new();
        // Bins by the room that they have left; of those with equal room the first.
        let mut rooms: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
        for (positions, piece) in order {
            let found = rooms.range(positions..).next().map(|(&room, bins)| (room, bins.first().copied()));
            let (room, bin) = match found {
                Some((room, Some(bin))) => {
                    if let Some(bins) = rooms.get_mut(&room) {
                        bins.remove(&bin);
                        if bins.is_empty() {
                            rooms.remove(&room);
                        }
                    }
                    (room, bin)
                }
                _ => {
                    bins.push(Vec::new());
                    (self.length as u32, bins.len() - 1)
                }
            };
            bins[bin].push(piece);
            if room > positions {
                rooms.entry(room - positions).or_default().insert(bin);
            }
        }
        for bin in &bins {
            self.sequences.extend(bin.iter().map(|&piece| pieces[piece as usize]));
            self.samples.push(self.sequences.len());
        }
        let used = |bin: &Vec<u64>| bin.iter().map(|&piece| pieces[piece as usize].1 as usize).sum::<usize>();
        let sequences = |bin: &Vec<u64>| bin.len() + usize::from(used(bin) < self.length);
        self.most_sequences = bins.iter().map(sequences).max().unwrap_or(1);
        let positions = bins.iter().map(used).sum();
        self.summary = PackingSummary {
            samples: bins.len(),
            sequences: pieces.len(),
            positions,
            efficiency: positions as f64 / (bins.len() * self.length) as f64,
            ..self.summary
        };
    }

    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    pub fn summary(&self) -> &PackingSummary {
        &self.summary
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.samples.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sequences of a sample: (first token, positions).
    fn sequences(&self, sample: usize) -> &[(usize, u32)] {
        &self.sequences[self.samples[sample]..self.samples[sample + 1]]
    }

    /// Tokens that sample `sample` asks for.
    pub fn asked(&self, sample: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.sequences(sample).iter().map(|&(begin, positions)| begin + 1..begin + 1 + positions as usize)
    }

    /// Writes sample `sample`.
    pub fn write(&self, sample: usize, row: &mut Row<'_>) {
        let mut at = 0;
        for &(begin, positions) in self.sequences(sample) {
            let here = at..at + positions as usize;
            self.corpus.read(begin, &mut row.tokens[here.clone()]);
            self.corpus.read(begin + 1, &mut row.labels[here.clone()]);
            self.corpus.weights(begin + 1, &mut row.weights[here.clone()]);
            if at > 0 {
                row.starts.push(at);
            }
            at = here.end;
        }
        if at < self.length {
            row.starts.push(at);
            row.tokens[at..].fill(self.corpus.pad());
            row.labels[at..].fill(self.corpus.pad());
            row.weights[at..].fill(0.0);
        }
    }
}

impl Samples for Packed {
    fn per_epoch(&self) -> u64 {
        self.len() as u64
    }

    fn most_sequences(&self) -> usize {
        self.most_sequences
    }

    fn fill(&self, number: u64, row: &mut Row<'_>) -> Result<()> {
        self.write(stream::place(number, self.per_epoch(), self.seed), row);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::corpus::{Builder, Encoded};
    use super::super::tokenizer::Tokenizer;
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    /// Documents of these lengths, ends not counted, with numbered tokens; `learned`: which of their tokens are.
    fn corpus(lengths: &[usize], learned: impl Fn(usize, usize) -> bool) -> Arc<Corpus> {
        let mut builder = Builder::text(&Tokenizer::bytes(), true, "").unwrap();
        for (number, &length) in lengths.iter().enumerate() {
            let flags = (0..length).map(|at| learned(number, at)).collect();
            let ids = (0..length).map(|at| ((number * 31 + at) % 256) as u32).collect();
            builder.add(b"", b"", Encoded { ids, learned: Some((flags, true)), ..Encoded::default() });
        }
        Arc::new(builder.finish())
    }

    type Written = (Vec<i32>, Vec<i32>, Vec<f32>, Vec<usize>);

    fn written(packed: &Packed, sample: usize) -> Written {
        let (mut tokens, mut labels) = (vec![-1; packed.length], vec![-1; packed.length]);
        let (mut weights, mut starts) = (vec![1.0; packed.length], Vec::new());
        packed.write(
            sample,
            &mut Row { tokens: &mut tokens, labels: &mut labels, weights: &mut weights, starts: &mut starts },
        );
        (tokens, labels, weights, starts)
    }

    #[test]
    fn by_hand() {
        // Positions: 6, 3, 2, 5, 1 in samples of 6.
        let packed = Packed::new(corpus(&[6, 3, 2, 5, 1], |_, _| true), 6, TooLong::Split, 1).unwrap();
        assert_eq!(packed.len(), 3);
        let full = written(&packed, 0);
        assert_eq!(full, (vec![0, 1, 2, 3, 4, 5], vec![1, 2, 3, 4, 5, 256], vec![1.0; 6], vec![]));
        // Five and one, the closest fit, though the sample of three has room for it too.
        let (tokens, labels, weights, starts) = written(&packed, 1);
        assert_eq!((tokens, labels), (vec![93, 94, 95, 96, 97, 124], vec![94, 95, 96, 97, 256, 256]));
        assert_eq!((weights, starts), (vec![1.0; 6], vec![5]));
        let (tokens, labels, weights, starts) = written(&packed, 2);
        assert_eq!((tokens, labels), (vec![31, 32, 33, 62, 63, 256], vec![32, 33, 256, 63, 256, 256]));
        assert_eq!((weights, starts), (vec![1.0, 1.0, 1.0, 1.0, 1.0, 0.0], vec![3, 5]));
        let summary = packed.summary();
        assert_eq!((summary.samples, summary.sequences, summary.positions), (3, 5, 17));
        assert_eq!(summary.efficiency, 17.0 / 18.0);
        assert_eq!(packed.most_sequences(), 3);
        assert_eq!(packed.asked(1).collect::<Vec<_>>(), [15..20, 21..22]);
    }

    #[rstest]
    #[case(
        TooLong::Split,
        0,
        "4 sequences packed into 3 samples, 75.00 % of them text; 1 documents longer than a sample were split"
    )]
    #[case(
        TooLong::Drop,
        1,
        "1 sequences packed into 1 samples, 50.00 % of them text; 1 documents longer than a sample were left out"
    )]
    fn long_documents_are_split_or_left_out_and_counted(
        #[case] how: TooLong,
        #[case] dropped: usize,
        #[case] said: &str,
    ) {
        let packed = Packed::new(corpus(&[10, 2], |_, _| true), 4, how, 1).unwrap();
        assert_eq!((packed.summary().too_long, packed.summary().dropped), (1, dropped));
        assert_eq!(packed.summary().to_string(), said.replace("75.00", "100.00"));
    }

    #[test]
    fn what_fits_nowhere_is_refused() {
        let failure = Packed::new(corpus(&[10], |_, _| true), 4, TooLong::Drop, 1).unwrap_err();
        assert_eq!(
            failure.sentence,
            "no document fits into samples of 4 tokens: 1 are longer, in 0 nothing is learned"
        );
        assert_eq!(failure.exit_status(), 4);
    }

    #[test]
    fn parts_of_which_nothing_is_learned_take_no_room() {
        // Of 13 positions only the last of the first document's three parts is learned.
        let packed = Packed::new(corpus(&[12, 2], |number, at| number == 1 || at > 9), 4, TooLong::Split, 1).unwrap();
        assert_eq!((packed.summary().sequences, packed.summary().unlearned), (2, 2));
    }

    proptest! {
        /// Every sequence is whole, in one sample and alone in its boundaries; every learned token is asked for once.
        #[test]
        fn any_documents(lengths in prop::collection::vec(1usize..40, 1..60), length in 2usize..24, seed in 0u64..9) {
            let corpus = corpus(&lengths, |number, at| !(number + at).is_multiple_of(3));
            let packed = Packed::new(Arc::clone(&corpus), length, TooLong::Split, seed).unwrap();
            let mut asked = vec![0; corpus.len()];
            for sample in 0..packed.len() {
                let (tokens, labels, weights, starts) = written(&packed, sample);
                let bounds: Vec<usize> = [0].into_iter().chain(starts).chain([length]).collect();
                prop_assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(bounds.len() - 1 <= packed.most_sequences());
                let sequences: Vec<_> = packed.asked(sample).collect();
                prop_assert!(bounds.len() - 1 - sequences.len() <= 1);
                let mut all = vec![0; corpus.len()];
                corpus.read(0, &mut all);
                for (range, bound) in sequences.iter().zip(&bounds) {
                    for (i, at) in range.clone().enumerate() {
                        asked[at] += 1;
                        prop_assert_eq!((tokens[bound + i], labels[bound + i]), (all[at - 1], all[at]));
                        prop_assert_eq!(weights[bound + i] == 1.0, corpus.learned(at));
                    }
                }
                let used: usize = sequences.iter().map(|range| range.len()).sum();
                prop_assert!(weights[used..].iter().all(|&weight| weight == 0.0));
            }
            let firsts: Vec<usize> = corpus.documents().map(|document| document.start).collect();
            for (at, times) in asked.into_iter().enumerate() {
                let wanted = corpus.learned(at) && !firsts.contains(&at);
                prop_assert!(times <= 1 && (!wanted || times == 1), "token {} {}", at, times);
            }
            // Two samples that would fit into one are never left apart.
            let used: Vec<usize> = (0..packed.len()).map(|sample| packed.asked(sample).map(|range| range.len()).sum()).collect();
            let mut least = used.clone();
            least.sort_unstable();
            prop_assert!(least.len() < 2 || least[0] + least[1] > length, "{:?}", used);
            let again = Packed::new(corpus, length, TooLong::Split, seed).unwrap();
            prop_assert_eq!(again.sequences, packed.sequences);
        }
    }
}
