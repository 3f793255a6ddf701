//! Hooks that panic in the method their config names.

use gantry_plugin_api::sdk::{Configure, Cx, Hooks, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the method.
    panic_in: String,
}

pub struct Misbehaving(String);

impl Configure for Misbehaving {
    type Config = Config;
    const SUMMARY: &'static str = "panics where it is told to";
    fn new(config: Config) -> Result<Misbehaving> {
        Ok(Misbehaving(config.panic_in))
    }
}

impl Misbehaving {
    fn at(&self, method: &str) -> Result<()> {
        if self.0 == method {
            panic!("asked to panic in {method}");
        }
        Ok(())
    }
}

impl Hooks for Misbehaving {
    fn run_begin(&mut self, _: &Cx) -> Result<()> {
        self.at("run_begin")
    }
    fn step_begin(&mut self, _: &Cx, _: u64) -> Result<()> {
        self.at("step_begin")
    }
    fn step_end(&mut self, _: &Cx, _: u64, _: &Value) -> Result<()> {
        self.at("step_end")
    }
    fn save(&mut self) -> Result<Value> {
        self.at("save").map(|()| Value::Null)
    }
    fn load(&mut self, _: &Value) -> Result<()> {
        self.at("load")
    }
    fn run_end(&mut self, _: &Cx) -> Result<()> {
        self.at("run_end")
    }
}
