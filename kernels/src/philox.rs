//! Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).
//!
//! A draw is a pure function of (seed, stream, step, position), so any layout of ranks and any order of execution
//! sees the same numbers, and a resumed run repeats them.

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// Ten rounds of Philox4x32.
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key[0] = key[0].wrapping_add(W0);
            key[1] = key[1].wrapping_add(W1);
        }
        let p0 = u64::from(M0) * u64::from(counter[0]);
        let p1 = u64::from(M1) * u64::from(counter[2]);
        counter =
            [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
    }
    counter
}

/// A stream of random numbers addressed by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    stream: u32,
    step: u32,
}

impl Stream {
    /// `stream` names the use (dropout of a layer, initialisation of a parameter, ...), `step` the training step.
    pub fn new(seed: u64, stream: u32, step: u32) -> Self {
        Stream { key: [seed as u32, (seed >> 32) as u32], stream, step }
    }

    /// Four words at `position`.
    #[inline(always)]
    pub fn words(&self, position: u64) -> [u32; 4] {
        philox4x32([position as u32, (position >> 32) as u32, self.stream, self.step], self.key)
    }

    /// Uniform in the open interval (0, 1), 53 bits, element `position`.
    #[inline(always)]
    pub fn uniform(&self, position: u64) -> f64 {
        let w = self.words(position);
        let bits = (u64::from(w[0]) << 21) ^ (u64::from(w[1]) >> 11);
        (bits as f64 + 0.5) * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal at `position` (Box-Muller, one of the pair).
    #[inline(always)]
    pub fn normal(&self, position: u64) -> f64 {
        let w = self.words(position);
        let u = ((u64::from(w[0]) << 21) ^ (u64::from(w[1]) >> 11)) as f64 + 0.5;
        let v = ((u64::from(w[2]) << 21) ^ (u64::from(w[3]) >> 11)) as f64 + 0.5;
        let scale = 1.0 / (1u64 << 53) as f64;
        (-2.0 * (u * scale).ln()).sqrt() * (std::f64::consts::TAU * v * scale).cos()
    }
}

/// A stream number from a name, for streams that belong to a parameter or a layer (FNV-1a).
pub fn stream_of(name: &str) -> u32 {
    name.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normal_has_unit_moments() {
        let stream = Stream::new(7, 1, 0);
        let n = 20_000u64;
        let mean = (0..n).map(|i| stream.normal(i)).sum::<f64>() / n as f64;
        let var = (0..n).map(|i| stream.normal(i).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.04, "mean {mean}, variance {var}");
    }
}
