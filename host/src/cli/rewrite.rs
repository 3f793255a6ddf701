//! What commands share that write a checkpoint from another: declared tensors in and out, and the recipe beside them.

use crate::checkpoint::{CheckpointReader, CheckpointWriter, LogicalTensor, TensorData};
use crate::failure::{Failure, Result};
use crate::model::entries::entries;
use crate::model::submodel::cut;
use crate::model::{ParamTable, params::Stored};
use crate::recipe::{Overrides, Recipe};
use gantry_plugin_api::plan::{Layout, ModelPlan, Stage};
use serde_json::{Map, Value};

/// Name of the recipe that lies beside the shards.
pub(super) const RECIPE: &str = "recipe.yaml";

/// The recipe of a checkpoint with another config of its model: alone, and without what it was trained by.
pub(super) fn plain_recipe(reader: &CheckpointReader, provider: &str, config: &Value) -> Result<String> {
    let bad = |error: &dyn std::fmt::Display| Failure::data(format!("the recipe of the checkpoint: {error}"));
    let text = reader.index().extra["recipe"].as_str().unwrap_or_default();
    let mut tree: Value = serde_saphyr::from_str(text).map_err(|error| bad(&error))?;
    for module in tree["modules"].as_object_mut().into_iter().flat_map(Map::values_mut) {
        if module["provider"] == provider {
            module["config"] = config.clone();
            for key in ["elastify", "teacher", "load"] {
                module[key] = Value::Null;
            }
        }
    }
    let text = serde_saphyr::to_string(&tree).map_err(|error| bad(&error))?;
    Recipe::parse(&text, &Overrides::default()).map_err(|failure| failure.at("the recipe of the new checkpoint"))?;
    Ok(text)
}

/// Every parameter of a plan on one rank.
pub(super) fn whole(plan: &ModelPlan) -> Result<ParamTable> {
    let grid = crate::mesh::Grid::SINGLE;
    ParamTable::new(plan, &Stage { begin: 0, end: plan.blocks.len() }, grid, grid.place(0))
}

/// A declared tensor: what it is called and made of, and where it belongs.
pub(super) struct Declared<'a> {
    pub name: &'a str,
    pub block: usize,
    pub dims: &'a [Layout],
    export: Option<&'a [usize]>,
    pub stored: &'a Stored,
}

/// Parameters, tied ones once, then buffers.
pub(super) fn declared<'a>(plan: &'a ModelPlan, table: &'a ParamTable) -> Vec<Declared<'a>> {
    let params = table.params.iter().map(|entry| {
        let param = &plan.params[entry.plan];
        let export = param.export_shape.as_deref();
        Declared { name: &param.name, block: param.block, dims: &param.dims, export, stored: &entry.stored }
    });
    let buffers = table.buffers.iter().map(|entry| {
        let buffer = &plan.buffers[entry.plan];
        Declared { name: &buffer.name, block: buffer.block, dims: &buffer.dims, export: None, stored: &entry.stored }
    });
    params.chain(buffers).collect()
}

impl Declared<'_> {
    /// Its tensors in a checkpoint, one after the other.
    pub fn take(&self, reader: &mut CheckpointReader) -> Result<Vec<LogicalTensor>> {
        let parts = entries(self.name, &self.stored.shape(), self.export);
        parts.iter().map(|(name, shape)| reader.take(name, shape)).collect()
    }

    /// Adds it to a checkpoint.
    pub fn write(&self, writer: &mut CheckpointWriter, values: TensorData) -> Result<()> {
        let parts = entries(self.name, &self.stored.shape(), self.export);
        let one = values.len() / parts.len().max(1);
        parts.into_iter().enumerate().try_for_each(|(i, (name, shape))| {
            let data = match &values {
                TensorData::F32(x) => TensorData::F32(x[i * one..][..one].to_vec()),
                TensorData::F64(x) => TensorData::F64(x[i * one..][..one].to_vec()),
            };
            writer.add(LogicalTensor { name, shape, data })
        })
    }
}

/// The elements of a declared tensor, which lies in a checkpoint as `parts` one after the other, at these positions of each
/// dimension.
pub(super) fn cut_one(parts: Vec<LogicalTensor>, shape: &[usize], keep: &[Vec<u32>]) -> TensorData {
    if parts.iter().all(|part| matches!(part.data, TensorData::F32(_))) {
        let values: Vec<f32> = parts.into_iter().flat_map(|part| part.data.into_f32()).collect();
        TensorData::F32(cut(&values, shape, keep))
    } else {
        let values: Vec<f64> = parts.into_iter().flat_map(|part| part.data.into_f64()).collect();
        TensorData::F64(cut(&values, shape, keep))
    }
}
