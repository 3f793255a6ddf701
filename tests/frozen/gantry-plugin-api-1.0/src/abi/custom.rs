//! Custom operators across the boundary: the host's slices to pointers and back.

use super::plugin::{Held, json_in, json_out};
use super::tables::PluginTableRef;
use super::types::{CustomRun, Object, RawRows, RawRowsMut, Reply};
use crate::plan::ProviderKind;
use crate::sdk::custom::{Backward, CustomOp, Forward, Number, Placement, Rows, RowsMut, Shape, Shapes};
use crate::sdk::{Error, Result, par_for};
use abi_stable::std_types::{RSlice, RStr, RString};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// What a custom operator says of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CustomShapes {
    pub placement: Placement,
    #[serde(flatten)]
    pub shapes: Shapes,
}

// The plugin's side.

/// A custom operator with its attributes bound.
pub(super) trait Bound: Send + Sync {
    fn shapes(&self, inputs: &[Shape]) -> Result<CustomShapes>;
    fn run(&self, run: &CustomRun<'_>) -> Result<()>;
}

struct BoundOp<O: CustomOp>(O::Attrs);

/// Binds the attributes, given as JSON.
pub(super) fn bind<O: CustomOp>(attrs: &serde_json::Value) -> Result<Box<dyn Bound>> {
    Ok(Box::new(BoundOp::<O>(crate::sdk::configure::parse(O::NAME, attrs)?)))
}

impl<O: CustomOp> Bound for BoundOp<O> {
    fn shapes(&self, inputs: &[Shape]) -> Result<CustomShapes> {
        Ok(CustomShapes { placement: O::PLACEMENT, shapes: O::shapes(&self.0, inputs)? })
    }

    fn run(&self, run: &CustomRun<'_>) -> Result<()> {
        if run.wide { self.typed::<f64>(run) } else { self.typed::<f32>(run) }
    }
}

impl<O: CustomOp> BoundOp<O> {
    fn typed<T: Number>(&self, run: &CustomRun<'_>) -> Result<()> {
        // SAFETY: the host made the pointers from slices of the type `wide` tells that live through this call, and no
        // two of those to be written overlap each other or any other.
        let read = |list: &RSlice<'_, RawRows>| list.iter().map(|r| unsafe { rows::<T>(r) }).collect();
        // SAFETY: as above.
        let write = |list: &RSlice<'_, RawRowsMut>| list.iter().map(|r| unsafe { rows_mut::<T>(r) }).collect();
        let work = match run.work.rows {
            0 => &mut [],
            // SAFETY: as above; scratch is one row.
            _ => unsafe { rows_mut::<T>(&run.work) }.data,
        };
        if run.backward {
            let mut call = Backward {
                inputs: read(&run.inputs),
                saved: read(&run.saved).into_iter().collect(),
                output_grads: read(&run.output_grads),
                input_grads: write(&run.outputs),
                work,
            };
            O::backward(&self.0, &mut call)
        } else {
            let outputs: SmallVec<[RowsMut<'_, T>; 8]> = write(&run.outputs);
            let saved = write(&run.saved_out).into_iter().collect();
            O::forward(&self.0, &mut Forward { inputs: read(&run.inputs), outputs, saved, work })
        }
    }
}

/// # Safety
/// `raw` describes elements of `T` that live for `'a`.
unsafe fn rows<'a, T>(raw: &RawRows) -> Rows<'a, T> {
    // SAFETY: the caller's promise.
    let data = unsafe { std::slice::from_raw_parts(raw.ptr.cast::<T>(), raw.len) };
    Rows { data, rows: raw.rows, cols: raw.cols, ld: raw.ld }
}

/// # Safety
/// As [`rows`], and nothing else reaches the elements during `'a`.
unsafe fn rows_mut<'a, T>(raw: &RawRowsMut) -> RowsMut<'a, T> {
    // SAFETY: the caller's promise.
    let data = unsafe { std::slice::from_raw_parts_mut(raw.ptr.cast::<T>(), raw.len) };
    RowsMut { data, rows: raw.rows, cols: raw.cols, ld: raw.ld }
}

pub(super) fn shapes(object: Object, inputs: RStr<'_>) -> Result<RString> {
    match Held::of(object)? {
        Held::Operator(op) => json_out(&op.shapes(&json_in::<Vec<Shape>>("shapes", inputs)?)?),
        _ => Err(Error::plugin("the host called a function of a custom operator on another kind of object")),
    }
}

pub(super) fn run(object: Object, call: &CustomRun<'_>) -> Result<()> {
    match Held::of(object)? {
        Held::Operator(op) => op.run(call),
        _ => Err(Error::plugin("the host called a function of a custom operator on another kind of object")),
    }
}

struct Base<T>(*mut T);
// SAFETY: used only to hand out disjoint rows, see `par_rows`.
unsafe impl<T: Send> Sync for Base<T> {}

impl<T> Base<T> {
    fn row(&self, at: usize) -> *mut T {
        self.0.wrapping_add(at)
    }
}

/// See [`RowsMut::par_rows`].
pub(crate) fn par_rows<T: Number>(
    rows: &mut RowsMut<'_, T>,
    grain: usize,
    f: &(impl Fn(usize, &mut [T]) + Sync),
) -> Result<()> {
    let (n, cols, ld) = (rows.rows, rows.cols, rows.ld);
    if n > 0 && (n - 1) * ld + cols > rows.data.len() || n > 1 && cols > ld {
        return Err(Error::shape("rows overlap or leave their buffer"));
    }
    let base = Base(rows.data.as_mut_ptr());
    par_for(n as u64, grain.max(1) as u64, |begin, end| {
        for i in begin as usize..end as usize {
            // SAFETY: row i is inside the buffer and apart from every other row (checked above), each index is visited
            // once, and `rows` is borrowed mutably until the loop is over.
            f(i, unsafe { std::slice::from_raw_parts_mut(base.row(i * ld), cols) });
        }
    })
}

// The host's side.

/// A custom operator of a plugin with its attributes bound, as the host holds it.
pub struct CustomInstance {
    name: String,
    table: PluginTableRef,
    object: Object,
}

// SAFETY: what the object holds is `Send + Sync` (see `Bound`), and the table's functions take it by shared reference.
unsafe impl Send for CustomInstance {}
// SAFETY: as above.
unsafe impl Sync for CustomInstance {}

/// A value for reading, row `i` at `data[i * ld ..][.. cols]`.
#[derive(Clone, Copy)]
pub struct In<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
}

/// A value for writing.
pub struct Out<'a, T> {
    pub data: &'a mut [T],
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
}

impl CustomInstance {
    /// `attrs` as JSON.
    pub fn new(name: &str, table: PluginTableRef, attrs: &str) -> Result<CustomInstance> {
        let object = table.create()(ProviderKind::Operator as u32, name.into(), attrs.into());
        let object = object.into_result().map_err(Error::from)?;
        Ok(CustomInstance { name: name.into(), table, object })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn shapes(&self, inputs: &[Shape]) -> Result<CustomShapes> {
        let inputs = serde_json::to_string(inputs).map_err(|e| Error::plugin(e.to_string()))?;
        let json =
            self.table.custom_shapes()(self.object, inputs.as_str().into()).into_result().map_err(Error::from)?;
        serde_json::from_str(&json).map_err(|e| Error::plugin(format!("custom operator {}: {e}", self.name)))
    }

    pub fn forward<T: Number>(
        &self,
        inputs: &[In<'_, T>],
        outputs: &mut [Out<'_, T>],
        saved: &mut [Out<'_, T>],
        work: &mut [T],
    ) -> Result<()> {
        let (inputs, outputs, saved) = (raw(inputs)?, raw_mut(outputs)?, raw_mut(saved)?);
        self.run(CustomRun {
            backward: false,
            wide: size_of::<T>() == 8,
            inputs: RSlice::from_slice(&inputs),
            saved: RSlice::from_slice(&[]),
            output_grads: RSlice::from_slice(&[]),
            outputs: RSlice::from_slice(&outputs),
            saved_out: RSlice::from_slice(&saved),
            work: scratch(work),
        })
    }

    pub fn backward<T: Number>(
        &self,
        inputs: &[In<'_, T>],
        saved: &[In<'_, T>],
        output_grads: &[In<'_, T>],
        input_grads: &mut [Out<'_, T>],
        work: &mut [T],
    ) -> Result<()> {
        let (inputs, saved, output_grads) = (raw(inputs)?, raw(saved)?, raw(output_grads)?);
        let input_grads = raw_mut(input_grads)?;
        self.run(CustomRun {
            backward: true,
            wide: size_of::<T>() == 8,
            inputs: RSlice::from_slice(&inputs),
            saved: RSlice::from_slice(&saved),
            output_grads: RSlice::from_slice(&output_grads),
            outputs: RSlice::from_slice(&input_grads),
            saved_out: RSlice::from_slice(&[]),
            work: scratch(work),
        })
    }

    fn run(&self, run: CustomRun<'_>) -> Result<()> {
        self.table.custom_run()(self.object, &run)
            .into_result()
            .map_err(|e| Error::from(e).at(format_args!("custom operator {}", self.name)))
    }
}

impl Drop for CustomInstance {
    fn drop(&mut self) {
        // A panic in an attribute's drop has been caught; there is nobody left to tell.
        let _: Reply<()> = self.table.release()(self.object);
    }
}

impl std::fmt::Debug for CustomInstance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CustomInstance").field(&self.name).finish()
    }
}

fn fits(rows: usize, cols: usize, ld: usize, len: usize) -> Result<()> {
    if rows > 0 && cols > 0 && (rows - 1) * ld + cols > len || rows > 1 && cols > ld {
        return Err(Error::shape(format!("{rows} rows of {cols}, {ld} apart, do not fit into {len} elements")));
    }
    Ok(())
}

fn raw<T>(list: &[In<'_, T>]) -> Result<SmallVec<[RawRows; 8]>> {
    list.iter()
        .map(|v| {
            fits(v.rows, v.cols, v.ld, v.data.len())?;
            Ok(RawRows { ptr: v.data.as_ptr().cast(), len: v.data.len(), rows: v.rows, cols: v.cols, ld: v.ld })
        })
        .collect()
}

fn raw_mut<T>(list: &mut [Out<'_, T>]) -> Result<SmallVec<[RawRowsMut; 8]>> {
    list.iter_mut()
        .map(|v| {
            fits(v.rows, v.cols, v.ld, v.data.len())?;
            let (ptr, len) = (v.data.as_mut_ptr().cast(), v.data.len());
            Ok(RawRowsMut { ptr, len, rows: v.rows, cols: v.cols, ld: v.ld })
        })
        .collect()
}

fn scratch<T>(work: &mut [T]) -> RawRowsMut {
    let len = work.len();
    RawRowsMut { ptr: work.as_mut_ptr().cast(), len, rows: usize::from(len > 0), cols: len, ld: len }
}
