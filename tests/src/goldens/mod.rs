//! Golden cases: numbers of reference implementations, against what this project computes in f32 and in f64.
//!
//! A folder holds cases NAME.json (+ NAME.safetensors). The `kind` of a case chooses its check, so further cases of a known
//! kind need no new code; every `out.*` and `grad.*` tensor of a case must have been compared. Kinds that nothing here can
//! check yet stand in [`LATER`]; any other kind that has no check fails the run.

pub mod attention;
pub mod case;
pub mod compare;
pub mod data;
pub mod flextron;
pub mod graph;
pub mod hybrid;
pub mod hybrid_hf;
pub mod kernel;
pub mod losses;
pub mod mamba;
pub mod moe;
pub mod norms;
pub mod optimizer;

use case::{Case, Result};
use compare::{Check, Compared, Precision};
use gantry_kernels::Element;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Kinds of cases for parts that are still to come. A star stands for any ending.
pub const LATER: &[&str] = &[
    "flextron_mamba",
    "flextron_attention",
    "flextron_moe",
    "flextron_stack",
    "flextron_hybrid",
    "flextron_slice_equivalence",
    "radio*",
    "pixel_shuffle",
];

/// The folder of the cases: `GANTRY_GOLDENS`, or this project's own.
pub fn folder() -> PathBuf {
    match std::env::var_os("GANTRY_GOLDENS").filter(|v| !v.is_empty()) {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens"),
    }
}

/// How a case came out.
#[derive(Debug)]
pub enum Outcome {
    /// Comparisons in f32 and in f64.
    Compared(Vec<Compared>, Vec<Compared>),
    Later,
    Failed(String),
}

/// Checks one case in both precisions.
pub fn check(case: &Case) -> Outcome {
    let both = in_precision::<f32>(case, Precision::F32).and_then(|single| match single {
        None => Ok(None),
        Some(single) => match in_precision::<f64>(case, Precision::F64) {
            Ok(double) => Ok(Some((single, double.unwrap_or_default()))),
            Err(e) => Err(format!("in f64: {e}")),
        },
    });
    match both {
        Ok(Some((single, double))) => Outcome::Compared(single, double),
        Ok(None) => Outcome::Later,
        Err(e) => Outcome::Failed(e),
    }
}

fn in_precision<T: Element>(case: &Case, precision: Precision) -> Result<Option<Vec<Compared>>> {
    let mut check = Check::new(case, precision);
    // A kind, or a name that begins with one where the case states none.
    let is = |kind: &str| case.kind == kind || (case.json.get("kind").is_none() && case.name.starts_with(kind));
    let later = |kind: &&&str| kind.strip_suffix('*').map_or(is(kind), |prefix| case.kind.starts_with(prefix));
    match () {
        _ if is("rmsnorm") || is("layernorm") => norms::norm::<T>(&mut check)?,
        _ if is("gated_rmsnorm") => norms::gated::<T>(&mut check)?,
        _ if is("causal_conv1d") => mamba::conv::<T>(&mut check)?,
        _ if is("ssd_scan") => mamba::scan::<T>(&mut check)?,
        _ if is("mamba2_mixer") => mamba::mixer::<T>(&mut check)?,
        _ if is("attention") => attention::attention::<T>(&mut check)?,
        _ if is("moe_bias_update") => moe::bias_update::<T>(&mut check)?,
        _ if is("moe_router") => moe::router::<T>(&mut check)?,
        _ if is("moe") => moe::layer::<T>(&mut check)?,
        _ if is("cross_entropy") => losses::cross_entropy::<T>(&mut check)?,
        _ if is("distillation") => losses::distillation::<T>(&mut check)?,
        _ if is("adam") => optimizer::adam::<T>(&mut check)?,
        _ if is("lr_wd_schedule") => optimizer::schedule(&mut check)?,
        _ if is("hybrid_tiny_megatron") => hybrid::megatron::<T>(&mut check)?,
        _ if is("flextron_schedules") => flextron::formulas::schedules(&mut check)?,
        _ if is("flextron_budget_choice") => flextron::formulas::budget_choice(&mut check)?,
        _ if is("flextron_sizes") => flextron::formulas::formula_sizes(&mut check)?,
        _ if is("flextron_budget_loss") => flextron::formulas::loss(&mut check)?,
        _ if is("flextron_loss_assembly") => flextron::formulas::assembly(&mut check)?,
        _ if is("flextron_router") => flextron::router::router::<T>(&mut check)?,
        _ if is("hybrid_tiny_hf") => hybrid_hf::hugging_face::<T>(&mut check)?,
        _ if is("gpt_dataset") => data::gpt_dataset(&mut check)?,
        _ if LATER.iter().any(|kind| later(&kind)) => return Ok(None),
        _ => return Err(format!("no check knows the kind {:?}", case.kind)),
    }
    check.finish().map(Some)
}

/// Checks every case of a folder; gives the table of results and whether all is well.
pub fn run(folder: &Path) -> Result<(String, bool)> {
    let mut table = String::new();
    let mut line = |columns: [&str; 5]| {
        let [name, kind, f32s, f64s, tensor] = columns;
        let _ = writeln!(table, "{name:39} {kind:26} {f32s:>11} {f64s:>10}  {tensor}");
    };
    line(["case", "kind", "f32 / limit", "f64 error", "worst tensor in f32"]);
    let (mut compared, mut later, mut failed) = (0, 0, Vec::new());
    for name in case::list(folder)? {
        let case = match Case::read(folder, &name) {
            Ok(case) => case,
            Err(e) => {
                failed.push(format!("{name}: {e}"));
                continue;
            }
        };
        match check(&case) {
            Outcome::Compared(single, double) => {
                compared += 1;
                let worst = single.iter().max_by(|a, b| a.of_allowed.total_cmp(&b.of_allowed));
                let f32s = worst.map_or(String::new(), |w| format!("{:.1e}", w.of_allowed));
                let f64s = double.iter().map(|c| c.relative).fold(0.0, f64::max);
                line([&name, &case.kind, &f32s, &format!("{f64s:.1e}"), worst.map_or("", |w| &w.tensor)]);
            }
            Outcome::Later => {
                later += 1;
                line([&name, &case.kind, "later", "", ""]);
            }
            Outcome::Failed(e) => {
                line([&name, &case.kind, "FAILED", "", ""]);
                failed.push(format!("{name}: {e}"));
            }
        }
    }
    let _ = writeln!(table, "{compared} compared, {later} of kinds to come, {} failed", failed.len());
    failed.iter().for_each(|e| {
        let _ = writeln!(table, "{e}");
    });
    Ok((table, failed.is_empty()))
}
