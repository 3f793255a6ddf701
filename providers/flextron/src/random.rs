//! Random numbers as pure functions of (seed, purpose, step, position): Philox4x32-10 (Salmon et al., SC 2011).

/// What numbers are drawn for; draws for different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Full model or a budget of the list.
    FullModel = 1,
    /// Which budget of the list.
    Budget = 2,
    /// Hard or soft sample.
    Hard = 3,
    /// Gumbel noise.
    Noise = 4,
}

/// Ten rounds of Philox4x32.
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let p0 = 0xD251_1F53u64 * u64::from(counter[0]);
        let p1 = 0xCD9E_8D57u64 * u64::from(counter[2]);
        counter =
            [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
    }
    counter
}

/// A uniform number in the open interval (0, 1), 53 bits. `lane` tells apart numbers of one purpose at one position
/// (the axis and choice that noise is for); it takes 28 bits.
pub fn uniform(seed: u64, purpose: Purpose, lane: u32, step: u32, position: u64) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let stream = (lane << 4) | purpose as u32;
    let words = philox4x32([position as u32, (position >> 32) as u32, stream, step], key);
    let bits = (u64::from(words[0]) << 21) ^ (u64::from(words[1]) >> 11);
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let key = [0xa409_3822, 0x299f_31d0];
        assert_eq!(philox4x32(counter, key), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn numbers_are_uniform_and_differ_by_every_key() {
        let base = uniform(1, Purpose::Budget, 0, 2, 3);
        let others = [
            uniform(2, Purpose::Budget, 0, 2, 3),
            uniform(1, Purpose::Noise, 0, 2, 3),
            uniform(1, Purpose::Budget, 1, 2, 3),
            uniform(1, Purpose::Budget, 0, 3, 3),
            uniform(1, Purpose::Budget, 0, 2, 4),
        ];
        assert!(others.iter().all(|x| *x != base));
        let n = 20_000;
        let mean = (0..n).map(|i| uniform(7, Purpose::Noise, 0, 0, i)).sum::<f64>() / n as f64;
        // Standard error of the mean of n uniform numbers.
        assert!((mean - 0.5).abs() < 4.0 / (12.0 * n as f64).sqrt(), "{mean}");
    }
}
