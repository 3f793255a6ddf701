//! Hook providers of a run: called at the loop's events, outside of the recorded step, on the loop's thread.
//!
//! A module of the recipe whose provider is of kind `hooks` names them. What they keep goes into checkpoints as JSON under
//! the module's name.

use crate::error::{Error, Result};
use crate::plugin::outside::OutsideRecording;
use crate::plugin::{HooksInstance, PluginSet};
use crate::recipe::Recipe;
use gantry_plugin_api::plan::ProviderKind;
use gantry_plugin_api::sdk::HookEvent;
use serde_json::{Map, Value};

/// The hooks of a run, in the recipe's order of module names.
#[derive(Default)]
pub struct HookSet(Vec<(String, HooksInstance)>);

impl HookSet {
    /// Instances of every hook module of the recipe.
    pub fn create(recipe: &Recipe, plugins: &PluginSet) -> Result<HookSet> {
        let mut hooks = Vec::new();
        for (name, module) in &recipe.modules {
            if plugins.kind(&module.provider) == Some(ProviderKind::Hooks) {
                hooks.push((name.clone(), plugins.hooks(&module.provider, &Value::Object(module.config.clone()))?));
            }
        }
        Ok(HookSet(hooks))
    }

    /// Names of the modules.
    pub fn modules(&self) -> Vec<&str> {
        self.0.iter().map(|(module, _)| module.as_str()).collect()
    }

    fn each(
        &mut self,
        event: impl Fn(&mut HooksInstance, &mut OutsideRecording<'_>) -> Result<(), crate::plugin::PluginError>,
    ) -> Result<()> {
        for (module, hooks) in &mut self.0 {
            let plugin = hooks.name().to_string();
            event(hooks, &mut OutsideRecording { plugin: &plugin })
                .map_err(|e| Error::from(e).at(format!("modules.{module}")))?;
        }
        Ok(())
    }

    pub fn run_begin(&mut self) -> Result<()> {
        self.each(|hooks, host| hooks.run_begin(host))
    }

    pub fn step_begin(&mut self, step: u64) -> Result<()> {
        self.each(|hooks, host| hooks.step_begin(host, step))
    }

    /// An event of a step with what there is to say; made only if somebody listens.
    pub fn report(&mut self, event: HookEvent, step: u64, report: impl FnOnce() -> Value) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let report = report();
        self.each(|hooks, host| hooks.report(event, host, step, &report))
    }

    pub fn run_end(&mut self) -> Result<()> {
        self.each(|hooks, host| hooks.run_end(host))
    }

    /// What every module keeps, by module name.
    pub fn save(&mut self) -> Result<Value> {
        let mut states = Map::new();
        for (module, hooks) in &mut self.0 {
            let state = hooks.save().map_err(|e| Error::from(e).at(format!("modules.{module}")))?;
            states.insert(module.clone(), state);
        }
        Ok(Value::Object(states))
    }

    /// Gives every module what it kept; one that is new to the checkpoint begins anew.
    pub fn load(&mut self, states: &Value) -> Result<()> {
        for (module, hooks) in &mut self.0 {
            match states.get(module.as_str()) {
                Some(state) => hooks.load(state).map_err(|e| Error::from(e).at(format!("modules.{module}")))?,
                None => tracing::warn!("the checkpoint has no state of the hooks modules.{module}"),
            }
        }
        Ok(())
    }
}
