//! Tiles of attention: at most 64 rows, products in place, sizes that follow from the shape alone.

pub use crate::cpu::product::{Left, Part, product};
use crate::real::Real;

/// Tokens of a query or key tile.
pub const TILE: usize = 64;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;

/// Transposes `rows` rows of `width` elements, `ld` apart, to `out[width, TILE]`; missing columns stay as they are.
pub fn transpose<T: Real>(x: &[T], ld: usize, rows: usize, width: usize, out: &mut [T]) {
    crate::cpu::product::transpose((rows, width), x, ld, out, TILE);
}

/// What there is of a product of a query tile that begins at token `query` with a key tile at `key`: the parts for the
/// scores, for a product with them, and for a product with their transpose.
pub fn parts(causal: bool, query: usize, key: usize) -> [Part; 3] {
    if causal && query == key { [Part::LowerResult, Part::LowerLeft, Part::UpperLeft] } else { [Part::All; 3] }
}
