//! An elastifier that misbehaves.

use gantry_plugin_api::plan::{AxisSetting, AxisState, ElasticPlan, MicroBatchInfo, ModelPlan};
use gantry_plugin_api::sdk::{Configure, Elastifier, Result};
use schemars::JsonSchema;
use serde::Deserialize;

#[derive(Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum How {
    PlanPanic,
    BeginPanic,
    WidthsPanic,
    DropPanic,
    NanState,
    UnevenState,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    how: How,
}

pub struct Elastic(How);

impl Configure for Elastic {
    type Config = Config;
    const SUMMARY: &'static str = "misbehaves by name";
    fn new(config: Config) -> Result<Elastic> {
        Ok(Elastic(config.how))
    }
}

impl Elastifier for Elastic {
    fn plan(&mut self, _: &ModelPlan) -> Result<ElasticPlan> {
        if self.0 == How::PlanPanic {
            panic!("asked to panic in plan");
        }
        Ok(ElasticPlan::default())
    }

    fn begin_micro_batch(&mut self, _: &MicroBatchInfo) -> Result<Vec<AxisSetting>> {
        let state = match self.0 {
            How::BeginPanic => panic!("asked to panic in begin_micro_batch"),
            How::NanState => AxisState::Hard { n: 4, gain: f64::NAN },
            How::UnevenState => AxisState::Soft { choices: vec![8, 4], p: vec![1.0] },
            _ => AxisState::Full,
        };
        Ok(vec![AxisSetting { axis: "hidden".into(), layer: None, state }])
    }

    fn widths(&mut self, _: f64) -> Result<Vec<AxisSetting>> {
        if self.0 == How::WidthsPanic {
            panic!("asked to panic in widths");
        }
        Ok(Vec::new())
    }
}

impl Drop for Elastic {
    fn drop(&mut self) {
        if self.0 == How::DropPanic {
            panic!("asked to panic in drop");
        }
    }
}
