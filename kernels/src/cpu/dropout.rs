//! Dropout whose mask depends on the global position of an element alone, so any layout drops the same elements.
//!
//!   y = x * keep / (1 - p),   keep = [w >= p * 2^32]
//! where w is word (e % 4) of the Philox draw at (seed, stream, step, e / 4) and e = token * C_global + channel, both
//! global. Backward is the same kernel on dy.

use super::softmax::{put, row, span};
use crate::kernel::{Args, Cost};
use crate::par;
use crate::philox::Stream;
use crate::real::Real;

/// y = dropout(x), or dx = dropout'(dy).
///
/// ins: x [tokens, cols]; ints: step [1], token_offset [1] (global index of the first token);
/// outs: y [tokens, cols].
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    pub tokens: usize,
    /// Local channels.
    pub cols: usize,
    pub ld_x: usize,
    pub ld_y: usize,
    /// Probability of dropping, in [0, 1); 1 gives zeros.
    pub p: f64,
    pub seed: u64,
    pub stream: u32,
    /// Index of the first row among the tokens that begin at token_offset.
    pub first_row: usize,
    /// Global index of channel 0 of part 0: where this segment of the channels begins.
    pub first_channel: usize,
    /// Channels of the whole activation.
    pub cols_global: usize,
    /// Channels are dealt out in runs of `unit`: run i lives on part i % `parts` as its run i / `parts`.
    pub parts: usize,
    pub part: usize,
    pub unit: usize,
    pub acc: bool,
}

crate::kernels! {
    Dropout => "dropout";
}

impl Dropout {
    fn cost(&self) -> Cost {
        let n = (self.tokens * self.cols) as f64;
        Cost::new(2.0 * n, 2.0 * n)
    }

    fn run<T: Real>(&self, args: Args<'_, T>) {
        let x = args.ins[0];
        let stream = Stream::new(self.seed, self.stream, args.ints[0][0] as u32);
        let offset = u64::from(args.ints[1][0] as u32) + self.first_row as u64;
        let threshold = (self.p * 4_294_967_296.0) as u64;
        let factor = if self.p < 1.0 { T::of(1.0 / (1.0 - self.p)) } else { T::ZERO };
        let unit = self.unit.max(1);
        let out = &mut args.outs[0][..span(self.tokens, self.ld_y, self.cols)];
        par::rows_mut(out, self.ld_y, par::block_rows(self.tokens, 16 * self.cols), |first, block| {
            for (i, y) in block.chunks_mut(self.ld_y).enumerate() {
                let x = row(x, first + i, self.ld_x, self.cols);
                let start = (offset + (first + i) as u64) * self.cols_global as u64;
                let (mut drawn, mut words) = (u64::MAX, [0; 4]);
                for (run, (x, y)) in x.chunks(unit).zip(y[..self.cols].chunks_mut(unit)).enumerate() {
                    let channel = (self.first_channel + (run * self.parts + self.part) * unit) as u64;
                    for ((&x, y), e) in x.iter().zip(y).zip(start + channel..) {
                        if e / 4 != drawn {
                            drawn = e / 4;
                            words = stream.words(drawn);
                        }
                        let keep = u64::from(words[(e % 4) as usize]) >= threshold;
                        put(y, if keep { x * factor } else { T::ZERO }, self.acc);
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::check::{Call, normal};

    const T: usize = 50;
    const C: usize = 24;

    fn whole(p: f64) -> Dropout {
        Dropout {
            tokens: T,
            cols: C,
            ld_x: C,
            ld_y: C,
            p,
            seed: 9,
            stream: 4,
            first_row: 0,
            first_channel: 0,
            cols_global: C,
            parts: 1,
            part: 0,
            unit: C,
            acc: false,
        }
    }

    fn run(kernel: &Dropout, x: Vec<f64>, y: Vec<f64>, step: i32, offset: i32) -> Vec<f64> {
        let mut call = Call { ins: vec![x], outs: vec![y], ints: vec![vec![step], vec![offset]], ..Call::default() };
        call.run(kernel);
        call.outs.remove(0)
    }

    #[test]
    fn drops_the_asked_share_and_scales_the_rest() {
        let y = run(&whole(0.3), vec![1.0; T * C], vec![f64::NAN; T * C], 1, 0);
        let kept = y.iter().filter(|&&y| y != 0.0).count() as f64 / y.len() as f64;
        assert!((kept - 0.7).abs() < 0.04, "kept {kept}");
        assert!(y.iter().all(|&y| y == 0.0 || (y - 1.0 / 0.7).abs() < 1e-12));
        assert_ne!(y, run(&whole(0.3), vec![1.0; T * C], vec![f64::NAN; T * C], 2, 0));
        assert_eq!(run(&whole(0.0), vec![1.0; T * C], vec![0.0; T * C], 1, 0), vec![1.0; T * C]);
    }

    /// Shards over tokens and over channels see the mask of the whole.
    #[test]
    fn any_layout_drops_the_same_elements() {
        let x = normal(1, T * C);
        let y = run(&whole(0.4), x.clone(), vec![f64::NAN; T * C], 3, 0);
        let tail = Dropout { tokens: T - 13, ..whole(0.4) };
        assert_eq!(run(&tail, x[13 * C..].to_vec(), vec![0.0; (T - 13) * C], 3, 13), y[13 * C..]);
        let lower = Dropout { first_row: 13, ..tail };
        assert_eq!(run(&lower, x[13 * C..].to_vec(), vec![0.0; (T - 13) * C], 3, 0), y[13 * C..]);
        // Two segments of channels, 5 and the rest.
        for (first_channel, cols) in [(0, 5), (5, C - 5)] {
            let segment = Dropout { first_channel, cols, unit: 1, ..whole(0.4) };
            let windows = run(&segment, x[first_channel..].to_vec(), vec![0.0; span(T, C, cols)], 3, 0);
            for (w, y) in windows.chunks(C).zip(y.chunks(C)) {
                assert_eq!(w[..cols], y[first_channel..][..cols]);
            }
        }
        for unit in [1, 3, 4] {
            for part in 0..2 {
                let channels: Vec<usize> = (0..C).filter(|c| c / unit % 2 == part).collect();
                let pick = |x: &[f64]| -> Vec<f64> {
                    x.chunks(C).flat_map(|x| channels.iter().map(|&c| x[c]).collect::<Vec<_>>()).collect()
                };
                let shard = Dropout { cols: C / 2, ld_x: C / 2, ld_y: C / 2, parts: 2, part, unit, ..whole(0.4) };
                assert_eq!(run(&shard, pick(&x), vec![0.0; T * C / 2], 3, 0), pick(&y), "unit {unit}, part {part}");
            }
        }
    }

    #[test]
    fn strides_and_accumulation() {
        let x = normal(2, T * C);
        let y = run(&whole(0.5), x.clone(), vec![0.0; T * C], 0, 0);
        let ld = C + 2;
        let kernel = Dropout { ld_y: ld, acc: true, ..whole(0.5) };
        let wide = run(&kernel, x, vec![5.0; span(T, ld, C)], 0, 0);
        for (wide, y) in wide.chunks(ld).zip(y.chunks(C)) {
            assert!(wide[..C].iter().zip(y).all(|(w, y)| *w == y + 5.0));
            assert!(wide[C..].iter().all(|&w| w == 5.0));
        }
    }
}
