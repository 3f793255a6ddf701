//! Providers, modules, elastifiers and hooks as safe Rust. Each belongs to the thread that made it: one per rank.

use super::PluginError;
use super::watch::watch;
use gantry_plugin_api::abi::host::HostObject;
use gantry_plugin_api::abi::tables::PluginTableRef;
use gantry_plugin_api::abi::types::{Ctx, Object, Reply};
use gantry_plugin_api::plan::{
    AxisSetting, Choice, ElasticPlan, MicroBatchInfo, ModelPlan, Occasion, ProviderKind, Stage, Submodel, Values,
};
use gantry_plugin_api::sdk::{Error, HookEvent, HostCalls, check_choice, check_settings, check_values};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::rc::Rc;

type Result<T, E = PluginError> = std::result::Result<T, E>;

/// A plugin's object and the table it came from; released on drop.
struct Owned {
    provider: Rc<str>,
    what: &'static str,
    table: PluginTableRef,
    object: Object,
}

impl Owned {
    fn create(provider: &str, table: PluginTableRef, kind: ProviderKind, config: &serde_json::Value) -> Result<Owned> {
        let provider: Rc<str> = provider.into();
        let config = config.to_string();
        let reply = {
            let _watch = watch(&provider, "create");
            table.create()(kind as u32, (&*provider).into(), config.as_str().into())
        };
        let object = reply.into_result().map_err(|e| call_error(&provider, e.into()))?;
        let what = match kind {
            ProviderKind::Model => "model",
            ProviderKind::Elastifier => "elastifier",
            _ => "hooks",
        };
        Ok(Owned { provider, what, table, object })
    }

    /// Calls a function of the table; errors carry the provider's name.
    fn call<T>(&self, what: &'static str, f: impl FnOnce(PluginTableRef, Object) -> Reply<T>) -> Result<T> {
        let _watch = watch(&self.provider, what);
        let _span = tracing::debug_span!("plugin_call", plugin = &*self.provider, call = what).entered();
        f(self.table, self.object).into_result().map_err(|e| self.error(e.into()))
    }

    fn error(&self, e: Error) -> PluginError {
        call_error(&self.provider, e)
    }

    fn json_in<T: DeserializeOwned>(&self, what: &str, text: &str) -> Result<T> {
        serde_json::from_str(text).map_err(|e| self.error(Error::plugin(format!("{what}: {e}"))))
    }

    fn json_out<T: Serialize>(&self, value: &T) -> Result<String> {
        serde_json::to_string(value).map_err(|e| self.error(Error::plugin(e.to_string())))
    }

    fn release(&mut self) -> Result<()> {
        let object = std::mem::replace(&mut self.object, Object { ptr: std::ptr::null_mut() });
        if object.ptr.is_null() {
            return Ok(());
        }
        let _watch = watch(&self.provider, "drop");
        self.table.release()(object).into_result().map_err(|e| self.error(e.into()))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Err(e) = self.release() {
            tracing::error!(target: "plugin", plugin = &*self.provider, "{e}, while its {} was given back", self.what);
        }
    }
}

pub(super) fn call_error(provider: &str, error: Error) -> PluginError {
    // Many of a provider's own messages begin with its name already.
    let prefix = format!("{provider}: ");
    let message = error.message.strip_prefix(&prefix).unwrap_or(&error.message).to_owned();
    PluginError::Call { provider: provider.into(), error: Error::new(error.kind, message) }
}

/// An instance of a model provider.
pub struct ModelProvider {
    owned: Owned,
    host: &'static HostObject,
}

impl ModelProvider {
    pub(super) fn create(name: &str, table: PluginTableRef, config: &serde_json::Value) -> Result<ModelProvider> {
        let owned = Owned::create(name, table, ProviderKind::Model, config)?;
        Ok(ModelProvider { owned, host: HostObject::leak(name) })
    }

    pub fn name(&self) -> &str {
        &self.owned.provider
    }

    /// The whole model's declaration, checked.
    pub fn plan(&self) -> Result<ModelPlan> {
        let json = self.owned.call("plan", |table, object| table.provider_plan()(object))?;
        let plan: ModelPlan = self.owned.json_in("plan", &json)?;
        plan.check().map_err(|e| self.owned.error(e))?;
        Ok(plan)
    }

    /// Keys of the config that a smaller model inside this one has other values of.
    pub fn submodel_config(&self, submodel: &Submodel) -> Result<serde_json::Map<String, serde_json::Value>> {
        let json = self.owned.json_out(submodel)?;
        let call = |table: PluginTableRef, object| table.provider_submodel()(object, json.as_str().into());
        let changes = self.owned.call("submodel_config", call)?;
        self.owned.json_in("submodel_config", &changes)
    }

    /// The module of one pipeline stage chunk.
    pub fn build(&self, stage: &Stage) -> Result<ModelStage> {
        let json = self.owned.json_out(stage)?;
        let object = self.owned.call("build", |table, object| table.provider_build()(object, json.as_str().into()))?;
        let provider = Rc::clone(&self.owned.provider);
        let owned = Owned { provider, what: "module", table: self.owned.table, object };
        Ok(ModelStage { owned, host: self.host })
    }

    /// Gives the instance back to its plugin; says what a drop could only log.
    pub fn close(mut self) -> Result<()> {
        self.owned.release()
    }
}

/// A built stage of a model.
pub struct ModelStage {
    owned: Owned,
    host: &'static HostObject,
}

impl ModelStage {
    /// Has the provider record its forward into `calls`.
    pub fn forward(&self, calls: &mut dyn HostCalls) -> Result<()> {
        visit(&self.owned, self.host, "forward", calls, |table, object, ctx| table.module_forward()(object, ctx))
    }

    /// Gives the module back to its plugin; says what a drop could only log.
    pub fn close(mut self) -> Result<()> {
        self.owned.release()
    }
}

fn visit<T>(
    owned: &Owned,
    host: &'static HostObject,
    what: &'static str,
    calls: &mut dyn HostCalls,
    f: impl FnOnce(PluginTableRef, Object, Ctx) -> Reply<T>,
) -> Result<T> {
    let _watch = watch(&owned.provider, what);
    host.visit(calls, |ctx| f(owned.table, owned.object, ctx).into_result().map_err(Error::from))
        .map_err(|e| owned.error(e))
}

/// An instance of an elastifier.
pub struct ElastifierInstance(Owned, &'static HostObject);

impl ElastifierInstance {
    pub(super) fn create(name: &str, table: PluginTableRef, config: &serde_json::Value) -> Result<Self> {
        let owned = Owned::create(name, table, ProviderKind::Elastifier, config)?;
        Ok(ElastifierInstance(owned, HostObject::leak(name)))
    }

    pub fn name(&self) -> &str {
        &self.0.provider
    }

    /// What it wants of a target model.
    pub fn plan(&mut self, target: &ModelPlan) -> Result<ElasticPlan> {
        let target = self.0.json_out(target)?;
        let json = self.0.call("plan", |table, object| table.elastifier_plan()(object, target.as_str().into()))?;
        let plan: ElasticPlan = self.0.json_in("elastic plan", &json)?;
        plan.router.iter().try_for_each(ModelPlan::check).map_err(|e| self.0.error(e))?;
        Ok(plan)
    }

    /// States of the axes that are not full, for one micro-batch.
    pub fn begin_micro_batch(&mut self, info: &MicroBatchInfo) -> Result<Vec<AxisSetting>> {
        let info = self.0.json_out(info)?;
        let json = self.0.call("begin_micro_batch", |t, object| t.elastifier_begin()(object, info.as_str().into()))?;
        self.settings(&json)
    }

    /// Has it record its router into `calls`.
    pub fn forward(&self, calls: &mut dyn HostCalls) -> Result<()> {
        visit(&self.0, self.1, "forward", calls, |table, object, ctx| table.elastifier_forward()(object, ctx))
    }

    /// Inputs of its router's program.
    pub fn router_inputs(&mut self, occasion: &Occasion) -> Result<Values> {
        let occasion = self.0.json_out(occasion)?;
        let json = self.0.call("router_inputs", |t, object| t.elastifier_inputs()(object, occasion.as_str().into()))?;
        let inputs = self.0.json_in("router inputs", &json)?;
        check_values("router_inputs", &inputs).map_err(|e| self.0.error(e))?;
        Ok(inputs)
    }

    /// What it makes of its router's outputs.
    pub fn choose(&mut self, occasion: &Occasion, outputs: &Values) -> Result<Choice> {
        let (occasion, outputs) = (self.0.json_out(occasion)?, self.0.json_out(outputs)?);
        let call = |t: PluginTableRef, object| {
            t.elastifier_choose()(object, occasion.as_str().into(), outputs.as_str().into())
        };
        let json = self.0.call("choose", call)?;
        let choice = self.0.json_in("choice", &json)?;
        check_choice(&choice).map_err(|e| self.0.error(e))?;
        Ok(choice)
    }

    /// Hard widths for a budget.
    pub fn widths(&mut self, budget: f64) -> Result<Vec<AxisSetting>> {
        let json = self.0.call("widths", |table, object| table.elastifier_widths()(object, budget))?;
        self.settings(&json)
    }

    fn settings(&self, json: &str) -> Result<Vec<AxisSetting>> {
        let settings: Vec<AxisSetting> = self.0.json_in("axis states", json)?;
        check_settings(&settings).map_err(|e| self.0.error(e))?;
        Ok(settings)
    }

    pub fn close(mut self) -> Result<()> {
        self.0.release()
    }
}

/// An instance of a set of hooks. `calls` is what its methods' `Cx` reaches.
pub struct HooksInstance {
    owned: Owned,
    host: &'static HostObject,
}

impl HooksInstance {
    pub(super) fn create(name: &str, table: PluginTableRef, config: &serde_json::Value) -> Result<Self> {
        let owned = Owned::create(name, table, ProviderKind::Hooks, config)?;
        Ok(HooksInstance { owned, host: HostObject::leak(name) })
    }

    pub fn name(&self) -> &str {
        &self.owned.provider
    }

    pub fn run_begin(&mut self, calls: &mut dyn HostCalls) -> Result<()> {
        self.event(HookEvent::RunBegin, calls, 0, "").map(drop)
    }

    pub fn step_begin(&mut self, calls: &mut dyn HostCalls, step: u64) -> Result<()> {
        self.event(HookEvent::StepBegin, calls, step, "").map(drop)
    }

    /// An event with a report: `Gradients`, `StepRefused`, `Evaluation`, or `StepEnd` with the step's metrics.
    pub fn report(
        &mut self,
        event: HookEvent,
        calls: &mut dyn HostCalls,
        step: u64,
        report: &serde_json::Value,
    ) -> Result<()> {
        self.event(event, calls, step, &report.to_string()).map(drop)
    }

    pub fn run_end(&mut self, calls: &mut dyn HostCalls) -> Result<()> {
        self.event(HookEvent::RunEnd, calls, 0, "").map(drop)
    }

    /// State for a checkpoint.
    pub fn save(&mut self) -> Result<serde_json::Value> {
        let json = self.quiet_event(HookEvent::Save, "")?;
        self.owned.json_in("state", &json)
    }

    pub fn load(&mut self, state: &serde_json::Value) -> Result<()> {
        self.quiet_event(HookEvent::Load, &state.to_string()).map(drop)
    }

    pub fn close(mut self) -> Result<()> {
        self.owned.release()
    }

    fn event(&self, event: HookEvent, calls: &mut dyn HostCalls, step: u64, json: &str) -> Result<String> {
        visit(&self.owned, self.host, event.name(), calls, |table, object, ctx| {
            table.hooks_event()(object, event as u32, ctx, step, json.into())
        })
        .map(Into::into)
    }

    fn quiet_event(&self, event: HookEvent, json: &str) -> Result<String> {
        let call = |table: PluginTableRef, object| table.hooks_event()(object, event as u32, Ctx::NONE, 0, json.into());
        self.owned.call(event.name(), call).map(Into::into)
    }
}
