//! The parameter table of one rank: what it holds of each declared tensor, where, and how it maps to logical order.

use super::layout::{StoredDim, resolve};
use crate::error::{Error, Result};
use crate::mesh::{Grid, Place};
use crate::program::dims::{AxisKey, Dim, Segment, local_units};
use gantry_kernels::philox::{Stream, stream_of};
use gantry_plugin_api::plan::{Axis, Buffer, BufferUpdate, Init, Layout, ModelPlan, Param, Shard, Stage};
use std::collections::HashMap;
use std::sync::Arc;

/// Structure shared by parameters and buffers.
#[derive(Clone, Debug)]
pub struct Stored {
    pub name: String,
    /// Layer of the block it belongs to.
    pub layer: Option<u16>,
    /// Dimensions at full width, with this rank's share.
    pub dims: Vec<Dim>,
    /// Stored position (full, all ranks) to logical position, per dimension.
    pub orders: Vec<Arc<StoredDim>>,
    pub init: Init,
    /// First element in the rank's flat storage.
    pub offset: usize,
    /// Elements on this rank.
    pub len: usize,
}

impl Stored {
    /// Logical shape over all ranks.
    pub fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(Dim::size).collect()
    }

    pub fn local_shape(&self) -> Vec<usize> {
        self.dims.iter().map(Dim::local).collect()
    }

    pub fn sharded(&self) -> bool {
        self.dims.iter().any(Dim::sharded)
    }

    /// Logical flat index of every local element, in storage order.
    pub fn logical_indices(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let positions: Vec<Vec<u32>> =
            self.dims.iter().zip(&self.orders).map(|(dim, order)| local_positions(dim, order)).collect();
        let sizes = self.shape();
        (0..self.len).map(move |mut element| {
            let (mut index, mut stride) = (0, 1);
            for (positions, size) in positions.iter().zip(&sizes).rev() {
                index += positions[element % positions.len()] as usize * stride;
                element /= positions.len();
                stride *= size;
            }
            index
        })
    }

    /// Logical positions of this rank's share of a dimension, in storage order.
    pub fn logical_positions(&self, dim: usize) -> Vec<u32> {
        local_positions(&self.dims[dim], &self.orders[dim])
    }

    /// Calls `f` for the local elements in storage order, in runs that lie together in both orders: first local element,
    /// first logical flat index, elements.
    pub fn each_logical_run(&self, mut f: impl FnMut(usize, usize, usize)) {
        let mut positions: Vec<Vec<u32>> =
            self.dims.iter().zip(&self.orders).map(|(dim, order)| local_positions(dim, order)).collect();
        let mut sizes = self.shape();
        // Rows: runs within the last dimension, repeated for every index of the others.
        let row = positions.pop().unwrap_or_else(|| vec![0]);
        let row_size = sizes.pop().unwrap_or(1);
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        for (local, &logical) in row.iter().enumerate() {
            match runs.last_mut() {
                Some((_, first, len)) if *first + *len == logical as usize => *len += 1,
                _ => runs.push((local, logical as usize, 1)),
            }
        }
        let (row_len, rows) = (row.len(), self.len.checked_div(row.len()).unwrap_or(0));
        for row in 0..rows {
            let (mut base, mut stride, mut rest) = (0, row_size, row);
            for (positions, size) in positions.iter().zip(&sizes).rev() {
                base += positions[rest % positions.len()] as usize * stride;
                rest /= positions.len();
                stride *= size;
            }
            runs.iter().for_each(|&(local, logical, len)| f(row * row_len + local, base + logical, len));
        }
    }

    /// Initial values in storage order, the same whatever the layout.
    pub fn initial(&self, seed: u64) -> impl Iterator<Item = f64> + use<> {
        let stream = Stream::new(seed, stream_of(&self.name), 0);
        let uniform = move |position: usize, low: f64, high: f64| low + (high - low) * stream.uniform(position as u64);
        let init = self.init;
        let draw = move |position: usize| match init {
            Init::Zeros => 0.0,
            Init::Ones => 1.0,
            Init::Constant(value) => value,
            Init::Normal { std } => std * stream.normal(position as u64),
            Init::Uniform { low, high } => uniform(position, low, high),
            Init::LogUniform { low, high } => uniform(position, low, high).ln(),
            Init::InverseSoftplus { low, high, floor } => {
                let dt = uniform(position, low.ln(), high.ln()).exp().max(floor);
                dt + (-(-dt).exp_m1()).ln()
            }
            _ => f64::NAN,
        };
        self.logical_indices().map(draw)
    }
}

/// Logical positions of this rank's share of a dimension, in storage order.
fn local_positions(dim: &Dim, order: &StoredDim) -> Vec<u32> {
    let mut positions = Vec::with_capacity(dim.local());
    let mut start = 0;
    for seg in &dim.segs {
        for unit in (seg.part..seg.full_units).step_by(seg.parts) {
            let first = start + unit * seg.unit;
            positions.extend_from_slice(&order.logical_of[first..first + seg.unit]);
        }
        start += seg.full_units * seg.unit;
    }
    positions
}

/// A trained tensor on this rank.
#[derive(Clone, Debug)]
pub struct ParamEntry {
    pub stored: Stored,
    /// Index in the plan.
    pub plan: usize,
    /// Multiplies the learning rate.
    pub lr_mult: f64,
    /// Multiplies the weight decay; 0: none.
    pub wd_mult: f64,
    pub tie: Option<String>,
}

/// A non-gradient tensor on this rank.
#[derive(Clone, Debug)]
pub struct BufferEntry {
    pub stored: Stored,
    pub plan: usize,
    pub update: BufferUpdate,
}

/// Everything a rank holds of a model's stage.
#[derive(Clone, Debug)]
pub struct ParamTable {
    pub axes: Vec<Axis>,
    pub params: Vec<ParamEntry>,
    pub buffers: Vec<BufferEntry>,
    /// Plan index to entry, for parameters on this stage; tied parameters share an entry.
    pub param_of_plan: Vec<Option<usize>>,
    pub buffer_of_plan: Vec<Option<usize>>,
    /// Elements of the flat parameter storage (and of the main gradients).
    pub param_len: usize,
    pub buffer_len: usize,
}

/// Whether weight decay applies to a parameter: as it is declared, which is by default where it has several dimensions;
/// never to a bias. The rule is Megatron-LM's: no decay of one-dimensional parameters and of names that end in `.bias`.
pub(crate) fn decays(param: &Param) -> bool {
    // A stack of biases, one per expert, is `...bias{experts}`.
    let name = param.name.split('{').next().unwrap_or_default();
    param.decay && !name.ends_with(".bias")
}

/// Storage begins on multiples of this many elements, for vector loads and device copies.
const ALIGN: usize = 32;

/// Elements of a tensor on a rank: more than any memory holds, and little enough that sums over tensors do not overflow.
const MAX_ELEMENTS: usize = 1 << 40;

impl ParamTable {
    /// Lays out the parameters of `stage` for a rank at `place` of `grid`.
    pub fn new(plan: &ModelPlan, stage: &Stage, grid: Grid, place: Place) -> Result<ParamTable> {
        let mut table = ParamTable {
            axes: plan.axes.clone(),
            params: Vec::new(),
            buffers: Vec::new(),
            param_of_plan: vec![None; plan.params.len()],
            buffer_of_plan: vec![None; plan.buffers.len()],
            param_len: 0,
            buffer_len: 0,
        };
        let mut names = HashMap::new();
        let mut ties: HashMap<&str, usize> = HashMap::new();
        for (index, param) in plan.params.iter().enumerate() {
            if let Some(other) = names.insert(param.name.as_str(), index) {
                return Err(Error::plugin(format!(
                    "the plan declares parameter {:?} twice (numbers {other} and {index})",
                    param.name
                )));
            }
            if param.block >= plan.blocks.len() {
                return Err(Error::plugin(format!(
                    "parameter {:?} belongs to block {}, but the plan has {} blocks",
                    param.name,
                    param.block,
                    plan.blocks.len()
                )));
            }
            if !(stage.begin..stage.end).contains(&param.block) {
                continue;
            }
            if let Some(&entry) = param.tie.as_deref().and_then(|tie| ties.get(tie)) {
                table.param_of_plan[index] = Some(entry);
                continue;
            }
            let layer = plan.blocks[param.block].layer;
            let mut stored = table.stored(&param.name, layer, &param.dims, param.init, grid, place)?;
            stored.offset = table.param_len;
            table.param_len += stored.len.next_multiple_of(ALIGN);
            if let Some(tie) = &param.tie {
                ties.insert(tie, table.params.len());
            }
            table.param_of_plan[index] = Some(table.params.len());
            table.params.push(ParamEntry {
                stored,
                plan: index,
                lr_mult: param.lr_mult,
                wd_mult: if decays(param) { 1.0 } else { 0.0 },
                tie: param.tie.clone(),
            });
        }
        for (index, buffer) in plan.buffers.iter().enumerate() {
            let Buffer { name, block, dims, init, update, .. } = buffer;
            if !(stage.begin..stage.end).contains(block) {
                continue;
            }
            let layer = plan.blocks[*block].layer;
            let mut stored = table.stored(name, layer, dims, *init, grid, place)?;
            stored.offset = table.buffer_len;
            table.buffer_len += stored.len.next_multiple_of(ALIGN);
            table.buffer_of_plan[index] = Some(table.buffers.len());
            table.buffers.push(BufferEntry { stored, plan: index, update: *update });
        }
        Ok(table)
    }

    fn stored(
        &self,
        name: &str,
        layer: Option<usize>,
        layouts: &[Layout],
        init: Init,
        grid: Grid,
        place: Place,
    ) -> Result<Stored> {
        let mut dims = Vec::new();
        let mut orders = Vec::new();
        for layout in layouts {
            let order = resolve(&self.axes, layout).map_err(|e| e.at(format!("parameter {name:?}")))?;
            dims.push(self.dim(&order, layer, grid, place).map_err(|e| e.at(format!("parameter {name:?}")))?);
            orders.push(Arc::new(order));
        }
        if dims.iter().filter(|dim| dim.sharded()).count() > 1 {
            return Err(Error::plugin(format!(
                "parameter {name:?} has two dimensions spread over tensor-parallel ranks; at most one can be"
            )));
        }
        let len = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(dim.local()).filter(|&n| n <= MAX_ELEMENTS));
        let Some(len) = len else {
            let shape = dims.iter().map(|dim| dim.size().to_string()).collect::<Vec<_>>().join(" x ");
            return Err(Error::recipe(format!(
                "parameter {name:?} of {shape} has more than the {MAX_ELEMENTS} elements a rank can hold; check the \
                 sizes in the module's config"
            )));
        };
        Ok(Stored { name: name.into(), layer: layer.map(|l| l as u16), dims, orders, init, offset: 0, len })
    }

    /// A dimension at full width as this rank holds it.
    pub fn dim(&self, order: &StoredDim, layer: Option<usize>, grid: Grid, place: Place) -> Result<Dim> {
        let mut segs = Vec::new();
        for leaf in &order.leaves {
            let mut seg = Segment::plain(&leaf.name, leaf.units);
            seg.unit = leaf.unit;
            if let Some(index) = leaf.axis {
                let axis = &self.axes[index];
                let layer = if axis.per_layer { layer.map(|l| l as u16) } else { None };
                seg.axis = Some(AxisKey { axis: index as u16, layer });
                if axis.shard == Some(Shard::Tp) && grid.tp > 1 {
                    if !axis.size.is_multiple_of(grid.tp) {
                        return Err(Error::recipe(format!(
                            "grid.tp = {} does not divide axis {:?} of size {}; choose a tp that divides it",
                            grid.tp, axis.name, axis.size
                        )));
                    }
                    (seg.parts, seg.part) = (grid.tp, place.tp);
                    debug_assert_eq!(seg.local_units(), local_units(axis.size, grid.tp, place.tp));
                }
            }
            segs.push(seg);
        }
        if segs.iter().any(Segment::sharded) && !segs.iter().all(Segment::sharded) {
            return Err(Error::plugin(
                "a dimension mixes segments that are spread over tensor-parallel ranks with segments that are not",
            ));
        }
        let name = match order.leaves.as_slice() {
            [one] => one.name.clone(),
            many => many.iter().map(|leaf| leaf.name.as_str()).collect::<Vec<_>>().join("|"),
        };
        Ok(Dim::of(&name, segs))
    }

    /// The parameter entry for a plan index, or an error that says on which stage it is missing.
    pub fn param(&self, plan: usize) -> Result<&ParamEntry> {
        match self.param_of_plan.get(plan) {
            Some(Some(entry)) => Ok(&self.params[*entry]),
            Some(None) => Err(Error::plugin(format!("parameter number {plan} belongs to another pipeline stage"))),
            None => Err(Error::plugin(format!(
                "parameter number {plan} does not exist; the plan declares {}",
                self.param_of_plan.len()
            ))),
        }
    }

    pub fn buffer(&self, plan: usize) -> Result<(usize, &BufferEntry)> {
        match self.buffer_of_plan.get(plan) {
            Some(Some(entry)) => Ok((*entry, &self.buffers[*entry])),
            Some(None) => Err(Error::plugin(format!("buffer number {plan} belongs to another pipeline stage"))),
            None => Err(Error::plugin(format!(
                "buffer number {plan} does not exist; the plan declares {}",
                self.buffer_of_plan.len()
            ))),
        }
    }
}
