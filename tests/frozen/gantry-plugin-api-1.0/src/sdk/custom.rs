//! Operators that a plugin brings itself: shapes, forward, backward, on the host's buffers.
//!
//! The host records a custom operator like any of its own and replays it without the provider. Its values are rows x
//! columns; a row is a token (for activations) or an output channel (for parameters). Work is spread over the host's
//! threads by [`RowsMut::par_rows`]; a plugin brings no thread pool of its own.

use super::{Cx, Error, Operand, Outputs, Result, Tensor};
use crate::ops;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A custom operator. Stateless: everything it knows beyond its inputs is in `Attrs`.
pub trait CustomOp: 'static {
    /// Attributes of a call; they cross as JSON once, when the call is recorded.
    type Attrs: Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static;

    /// Name in the process; begin it with the plugin's, e.g. `my-model.cumsum`.
    const NAME: &'static str;
    /// One line for `gantry inspect`.
    const SUMMARY: &'static str;
    /// What may be done to it under tensor parallelism.
    const PLACEMENT: Placement = Placement::Alone;

    /// Shapes of results, of what forward saves for backward, and scratch, from the shapes of the inputs.
    fn shapes(attrs: &Self::Attrs, inputs: &[Shape]) -> Result<Shapes>;

    /// Writes every element of outputs and saved values.
    fn forward<T: Number>(attrs: &Self::Attrs, call: &mut Forward<'_, T>) -> Result<()>;

    /// Writes every element of the inputs' gradients.
    fn backward<T: Number>(attrs: &Self::Attrs, call: &mut Backward<'_, T>) -> Result<()> {
        let _ = (attrs, call);
        Err(Error::plugin("it has no backward"))
    }
}

/// What an operator does to spread inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Placement {
    /// It was not thought about: an error under tensor parallelism.
    Alone,
    /// Each row of a result depends on the same row of the activations and on whole parameters only, so any rank can do
    /// its rows. Spread columns are an error.
    Rows,
}

/// Rows and columns of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub rows: usize,
    pub cols: usize,
}

/// Shape of a result, told by an input, so that names and placements follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ResultShape {
    /// As input `0`.
    Like(usize),
    /// The rows of an input, each this wide.
    Rows { of: usize, cols: usize },
}

/// Answer of [`CustomOp::shapes`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shapes {
    pub outputs: Vec<ResultShape>,
    /// Kept from forward to backward.
    pub saved: Vec<ResultShape>,
    /// Elements of scratch of one forward, and of one backward.
    pub forward_work: usize,
    pub backward_work: usize,
}

/// Operands of a forward.
pub struct Forward<'a, T> {
    pub inputs: SmallVec<[Rows<'a, T>; 8]>,
    pub outputs: SmallVec<[RowsMut<'a, T>; 8]>,
    pub saved: SmallVec<[RowsMut<'a, T>; 4]>,
    /// Unspecified contents.
    pub work: &'a mut [T],
}

/// Operands of a backward.
pub struct Backward<'a, T> {
    pub inputs: SmallVec<[Rows<'a, T>; 8]>,
    pub saved: SmallVec<[Rows<'a, T>; 4]>,
    /// Gradients of the outputs, zero where nothing depends on one.
    pub output_grads: SmallVec<[Rows<'a, T>; 8]>,
    /// Gradients of the inputs, to be overwritten.
    pub input_grads: SmallVec<[RowsMut<'a, T>; 8]>,
    /// Unspecified contents.
    pub work: &'a mut [T],
}

/// `rows` rows of `cols` elements, `ld` apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    pub(crate) data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub(crate) ld: usize,
}

impl<'a, T> Rows<'a, T> {
    pub fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.ld..][..self.cols]
    }
}

/// As [`Rows`], to be written.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    pub(crate) data: &'a mut [T],
    pub rows: usize,
    pub cols: usize,
    pub(crate) ld: usize,
}

impl<T: Number> RowsMut<'_, T> {
    pub fn row(&mut self, i: usize) -> &mut [T] {
        &mut self.data[i * self.ld..][..self.cols]
    }

    /// Calls `f(i, row)` for every row on the host's threads, at least `grain` rows at a time.
    pub fn par_rows(&mut self, grain: usize, f: impl Fn(usize, &mut [T]) + Sync) -> Result<()> {
        crate::abi::custom::par_rows(self, grain, &f)
    }
}

/// The floating-point type of the run: f32, or f64 in tests.
pub trait Number:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + 'static
{
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Number for f32 {
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f64 {
    fn from_f64(x: f64) -> f64 {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
}

impl Cx {
    /// Records a custom operator of this plugin (or of any other that is loaded).
    pub fn custom<O: CustomOp>(&self, path: &str, attrs: &O::Attrs, inputs: &[Tensor]) -> Result<Outputs> {
        let attrs = serde_json::to_string(attrs).map_err(|e| Error::plugin(format!("{path}: {e}")))?;
        self.op_many(path, &ops::Custom { name: O::NAME.into(), attrs }, inputs)
    }

    /// An operand as a tensor, for the input list of [`Cx::custom`] and [`Cx::op`].
    pub fn tensor(&self, operand: impl Operand) -> Result<Tensor> {
        operand.resolve(self)
    }
}
