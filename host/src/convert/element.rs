//! Types of elements in files, and from one to another.

use half::{bf16, f16};
use safetensors::Dtype;

/// A type of elements that tensors of models have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F64,
    F32,
    Bf16,
    F16,
}

impl Element {
    pub const ALL: [Element; 4] = [Element::F64, Element::F32, Element::Bf16, Element::F16];

    pub fn of(dtype: Dtype) -> Option<Element> {
        Element::ALL.into_iter().find(|element| element.dtype() == dtype)
    }

    /// By safetensors' name.
    pub fn named(name: &str) -> Option<Element> {
        Element::ALL.into_iter().find(|element| element.name() == name)
    }

    pub fn dtype(self) -> Dtype {
        match self {
            Element::F64 => Dtype::F64,
            Element::F32 => Dtype::F32,
            Element::Bf16 => Dtype::BF16,
            Element::F16 => Dtype::F16,
        }
    }

    /// safetensors' name.
    pub fn name(self) -> &'static str {
        match self {
            Element::F64 => "F64",
            Element::F32 => "F32",
            Element::Bf16 => "BF16",
            Element::F16 => "F16",
        }
    }

    /// As `config.json` calls it.
    pub fn torch(self) -> &'static str {
        match self {
            Element::F64 => "float64",
            Element::F32 => "float32",
            Element::Bf16 => "bfloat16",
            Element::F16 => "float16",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::F64 => 8,
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }

    /// Whether every number of `other` is one of these.
    pub fn holds(self, other: Element) -> bool {
        self == other || self == Element::F64 || (self == Element::F32 && other != Element::F64)
    }
}

/// Appends elements of type `from` to `out` as `to`, little-endian both; rounds to nearest where `to` is narrower. An
/// element that is no finite number, or too large for `to`, is an error: its index.
pub fn convert(bytes: &[u8], from: Element, to: Element, out: &mut Vec<u8>) -> Result<(), usize> {
    match from {
        Element::F64 => each(bytes, |b: [u8; 8]| f64::from_le_bytes(b), to, from, out),
        Element::F32 => each(bytes, |b: [u8; 4]| f64::from(f32::from_le_bytes(b)), to, from, out),
        Element::Bf16 => each(bytes, |b: [u8; 2]| bf16::from_le_bytes(b).to_f64(), to, from, out),
        Element::F16 => each(bytes, |b: [u8; 2]| f16::from_le_bytes(b).to_f64(), to, from, out),
    }
}

fn each<const N: usize>(
    bytes: &[u8],
    read: impl Fn([u8; N]) -> f64 + Copy,
    to: Element,
    from: Element,
    out: &mut Vec<u8>,
) -> Result<(), usize> {
    let items = bytes.as_chunks::<N>().0;
    let begin = out.len();
    // Of f32 and f64 in one step each: rounding once.
    match to {
        _ if to == from => out.extend_from_slice(items.as_flattened()),
        Element::F64 => out.extend(items.iter().flat_map(|b| read(*b).to_le_bytes())),
        Element::F32 => out.extend(items.iter().flat_map(|b| (read(*b) as f32).to_le_bytes())),
        Element::Bf16 => out.extend(items.iter().flat_map(|b| narrow(read(*b)).to_le_bytes())),
        Element::F16 => out.extend(items.iter().flat_map(|b| f16::from_f64(read(*b)).to_le_bytes())),
    }
    match first_nonfinite(&out[begin..], to) {
        Some(at) => Err(at),
        None => Ok(()),
    }
}

/// To nearest, ties to even. f64 that are f32 already, as weights are, take the short way.
fn narrow(x: f64) -> bf16 {
    let single = x as f32;
    if f64::from(single) == x { bf16::from_f32(single) } else { bf16::from_f64(x) }
}

/// The first element with all bits of the exponent set.
fn first_nonfinite(bytes: &[u8], ty: Element) -> Option<usize> {
    let exponent16 = |mask: u16| {
        let bad = |b: &[u8; 2]| u16::from_le_bytes(*b) & mask == mask;
        let items = bytes.as_chunks::<2>().0;
        items.iter().fold(false, |any, b| any | bad(b)).then(|| items.iter().position(bad)).flatten()
    };
    match ty {
        Element::Bf16 => exponent16(0x7f80),
        Element::F16 => exponent16(0x7c00),
        Element::F32 => {
            let bad = |b: &[u8; 4]| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000;
            let items = bytes.as_chunks::<4>().0;
            items.iter().fold(false, |any, b| any | bad(b)).then(|| items.iter().position(bad)).flatten()
        }
        Element::F64 => {
            let items = bytes.as_chunks::<8>().0;
            items.iter().position(|b| !f64::from_le_bytes(*b).is_finite())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(bytes: &[u8], from: Element, to: Element) -> Result<Vec<u8>, usize> {
        let mut out = Vec::new();
        convert(bytes, from, to, &mut out).map(|()| out)
    }

    #[test]
    fn every_half_goes_through_f32_and_back() {
        for half in [Element::Bf16, Element::F16] {
            for bits in 0..=u16::MAX {
                let bytes = bits.to_le_bytes();
                match through(&bytes, half, Element::F32) {
                    Ok(wide) => assert_eq!(through(&wide, Element::F32, half).unwrap(), bytes),
                    Err(at) => assert_eq!(at, 0),
                }
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even_and_too_large_is_an_error() {
        let to = |x: f32| through(&x.to_le_bytes(), Element::F32, Element::Bf16);
        let bits = |x: f32| to(x).map(|b| u16::from_le_bytes([b[0], b[1]]));
        assert_eq!(bits(1.0 + 1.0 / 256.0), Ok(0x3f80));
        assert_eq!(bits(1.0 + 3.0 / 256.0), Ok(0x3f82));
        assert_eq!(bits(f32::MAX), Err(0));
        let two = [1f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat();
        assert_eq!(through(&two, Element::F32, Element::F32), Err(1));
    }

    proptest! {
        #[test]
        fn what_is_kept_is_kept(x in any::<f32>(), wide in any::<f64>()) {
            prop_assume!(x.is_finite() && wide.is_finite());
            prop_assert_eq!(through(&x.to_le_bytes(), Element::F32, Element::F32).unwrap(), x.to_le_bytes());
            let up = through(&x.to_le_bytes(), Element::F32, Element::F64).unwrap();
            prop_assert_eq!(through(&up, Element::F64, Element::F32).unwrap(), x.to_le_bytes());
            if let Ok(bytes) = through(&wide.to_le_bytes(), Element::F64, Element::Bf16) {
                prop_assert_eq!(bytes, bf16::from_f64(wide).to_le_bytes());
            }
        }
    }
}
