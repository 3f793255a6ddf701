//! Shorthand for declarations: the fields that matter, defaults for the rest.
//!
//! ```
//! use gantry_plugin_api::plan::{Axis, Init, Layout, Param};
//!
//! let heads = Axis::new("heads", 16).tensor_parallel().elastic_per_layer();
//! let q = Param::new("q.weight", 0, [Layout::axis("heads", 64), Layout::Fixed(1024)], Init::Normal { std: 0.02 });
//! assert!(heads.per_layer && q.decay);
//! ```

use crate::plan::{
    Axis, Block, Buffer, BufferUpdate, Direction, Footprint, FootprintKind, Init, Layout, Param, Port, PortKind, Shard,
};

impl Axis {
    /// An axis of fixed width, the same on every rank.
    pub fn new(name: &str, size: usize) -> Axis {
        Axis { name: name.into(), size, group: None, shard: None, elastic: false, per_layer: false, active: None }
    }

    /// Its units come in equal groups, one per unit of `axis`.
    pub fn grouped_by(mut self, axis: &str) -> Axis {
        self.group = Some(axis.into());
        self
    }

    /// Its units are spread over tensor-parallel ranks.
    pub fn tensor_parallel(mut self) -> Axis {
        self.shard = Some(Shard::Tp);
        self
    }

    /// An elastifier may narrow it, on all layers alike.
    pub fn elastic(mut self) -> Axis {
        self.elastic = true;
        self
    }

    /// An elastifier may narrow it, on each layer by itself.
    pub fn elastic_per_layer(mut self) -> Axis {
        (self.elastic, self.per_layer) = (true, true);
        self
    }

    /// One token passes through `units` of its units, see [`Axis::active`].
    pub fn active(mut self, units: usize) -> Axis {
        self.active = Some(units);
        self
    }
}

impl Block {
    pub fn new(path: impl Into<String>, kind: &str) -> Block {
        Block {
            path: path.into(),
            kind: kind.into(),
            layer: None,
            starts_stage: false,
            extra_flops_per_token: 0.0,
            memory: Vec::new(),
        }
    }

    /// It is layer `number`, from 0, of the residual stream.
    pub fn layer(mut self, number: usize) -> Block {
        self.layer = Some(number);
        self
    }

    /// See [`Block::extra_flops_per_token`].
    pub fn extra_flops(mut self, per_token: f64) -> Block {
        self.extra_flops_per_token = per_token;
        self
    }

    /// Memory it needs at inference, see [`Block::memory`].
    pub fn keeps(mut self, kind: FootprintKind, dims: impl IntoIterator<Item = Layout>) -> Block {
        self.memory.push(Footprint { kind, dims: dims.into_iter().collect() });
        self
    }
}

impl Param {
    /// Weight decay applies unless it has one dimension only.
    pub fn new(name: impl Into<String>, block: usize, dims: impl IntoIterator<Item = Layout>, init: Init) -> Param {
        let dims: Vec<Layout> = dims.into_iter().collect();
        Param {
            name: name.into(),
            block,
            decay: dims.len() > 1,
            dims,
            init,
            lr_mult: 1.0,
            fp32: false,
            tie: None,
            export_shape: None,
            hf_name: None,
        }
    }

    /// Its name in Hugging Face folders, see [`Param::hf_name`].
    pub fn hf(mut self, name: impl Into<String>) -> Param {
        self.hf_name = Some(name.into());
        self
    }

    /// Kept in fp32 whatever the training precision.
    pub fn in_fp32(mut self) -> Param {
        self.fp32 = true;
        self
    }

    /// One tensor with every other parameter tied under `key`.
    pub fn tied(mut self, key: &str) -> Param {
        self.tie = Some(key.into());
        self
    }

    /// Its shape in checkpoints, see [`Param::export_shape`].
    pub fn exported_as(mut self, shape: impl IntoIterator<Item = usize>) -> Param {
        self.export_shape = Some(shape.into_iter().collect());
        self
    }
}

impl Buffer {
    pub fn new(name: impl Into<String>, block: usize, dims: impl IntoIterator<Item = Layout>, init: Init) -> Buffer {
        let dims = dims.into_iter().collect();
        Buffer { name: name.into(), block, dims, init, update: BufferUpdate::None, hf_name: None }
    }

    /// What the host does with it once per optimizer step.
    pub fn updated_by(mut self, update: BufferUpdate) -> Buffer {
        self.update = update;
        self
    }

    /// Its name in Hugging Face folders, if it differs.
    pub fn hf(mut self, name: impl Into<String>) -> Buffer {
        self.hf_name = Some(name.into());
        self
    }
}

impl Port {
    pub fn input(name: &str, kind: PortKind) -> Port {
        Port { name: name.into(), direction: Direction::Input, kind, channels: None }
    }

    pub fn output(name: &str, kind: PortKind) -> Port {
        Port { direction: Direction::Output, ..Port::input(name, kind) }
    }

    /// What its channels are made of.
    pub fn channels(mut self, layout: Layout) -> Port {
        self.channels = Some(layout);
        self
    }
}
