//! `gantry slice`: a smaller model on disk gives what the larger one gives at those widths.

use gantry::checkpoint::CheckpointReader;
use gantry::mesh::Grid;
use gantry::train::rank::Elastic;
use gantry::train::team::{Kind, Team, TeamSpec};
use gantry_plugin_api::plan::{AxisSetting, AxisState};
use gantry_tests::layouts::{batch, relative_l2, spec};
use gantry_tests::plugins::{file_name, fixture, providers};
use gantry_tests::runs::{RECIPE, Runs};
use rstest::rstest;
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use std::sync::OnceLock;

/// A trained model in `run`, in f64.
fn trained() -> &'static Runs {
    static RUNS: OnceLock<Runs> = OnceLock::new();
    RUNS.get_or_init(|| {
        let recipe =
            RECIPE.replace("pattern: M*E-", "pattern: ME*-M*E").replace("seq_length", "precision: fp64, seq_length");
        let runs = Runs::of(&recipe);
        runs.train("run", "4", &[]);
        runs
    })
}

fn slice(out: &str, more: &[&str]) -> Output {
    trained().gantry(&[&["slice", "--checkpoint", "run", "--out", out], more].concat())
}

/// A team with the parameters of a checkpoint, made by its recipe's config.
fn team(folder: &Path) -> Team<f64> {
    let mut reader = CheckpointReader::open(folder).unwrap();
    let recipe: Value = serde_saphyr::from_str(reader.index().extra["recipe"].as_str().unwrap()).unwrap();
    let config = recipe["modules"]["lm"]["config"].clone();
    let spec = spec("nemotron-hybrid", config, Grid::SINGLE);
    let team = Team::<f64>::start(&TeamSpec { plugins: providers(&["nemotron-hybrid"]), ..spec }).unwrap();
    for kind in [Kind::Params, Kind::Buffers] {
        for (index, parts) in team.entries(kind).unwrap().into_iter().enumerate() {
            let values =
                parts.into_iter().flat_map(|(name, shape)| reader.take(&name, &shape).unwrap().data.into_f64());
            team.scatter(kind, index, values.collect()).unwrap();
        }
    }
    reader.finish(|name| name.starts_with("optimizer.")).unwrap();
    team
}

fn logits(team: &Team<f64>, settings: Vec<AxisSetting>) -> Vec<f64> {
    team.all(move |rank| {
        rank.elastic = Elastic::Fixed(settings.clone());
        rank.logits(&batch(3, 0))
    })
    .unwrap()
    .remove(0)
    .unwrap()
}

#[rstest]
#[case::hidden(&[("hidden", 20)], &[])]
#[case::heads(&[("mamba_heads", 2), ("attention_heads", 2)], &[])]
#[case::experts(&[("experts", 3), ("moe_ffn", 10)], &[])]
#[case::layers(&[], &[0, 5])]
#[case::everything(
    &[("hidden", 24), ("mamba_heads", 2), ("attention_heads", 2), ("ffn", 30), ("experts", 2), ("moe_ffn", 7)],
    &[1, 3]
)]
fn the_smaller_model_gives_what_the_larger_gives_at_its_widths(
    #[case] widths: &[(&str, usize)],
    #[case] dropped: &[usize],
) {
    let runs = trained();
    let out = format!("sliced-{}-{}", widths.first().map_or("layers", |w| w.0), widths.len());
    let mut arguments: Vec<String> = widths.iter().map(|(axis, n)| format!("--width={axis}={n}")).collect();
    arguments.extend(dropped.iter().map(|layer| format!("--drop-layer={layer}")));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = slice(&out, &[&arguments[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    let setting = |axis: &str, layer, n| AxisSetting { axis: axis.into(), layer, state: AxisState::Slice { n } };
    let mut settings: Vec<AxisSetting> = widths.iter().map(|(axis, n)| setting(axis, None, *n)).collect();
    settings.extend(dropped.iter().map(|&layer| setting("depth", Some(layer), 0)));
    let parent = team(&runs.checkpoints("run").join("step-00000004"));
    let small = team(&runs.path().join(&out));
    let error = relative_l2(&logits(&parent, settings), &logits(&small, Vec::new()));
    assert!(error < 1e-12, "logits differ by {error:e}");
    // Not so at other widths.
    assert!(relative_l2(&logits(&parent, Vec::new()), &logits(&small, Vec::new())) > 1e-3);

    // The recipe beside it plans the model that was counted, and goes on from its parameters.
    let recipe = format!("{out}/recipe.yaml");
    let plan = runs.gantry(&["plan", &recipe, "--json"]);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(plan["parameters"], report["parameters"]);
    let load = format!("modules.lm.load={out}");
    let run = format!("{out}-run");
    let output = runs.gantry(&["train", &recipe, "--run-dir", &run, "--steps", "2", "--set", &load]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[rstest]
#[case::no_submodel(&[], 2, "required arguments")]
#[case::no_axis(&["--width", "width=3"], 2, "the model has no elastic axis \"width\"; it has hidden, mamba_heads")]
#[case::groups(&["--width", "mamba_heads=3"], 2, "cannot keep 3 units; choose a multiple of its 2 groups from 2 to 4")]
#[case::one_layer(&["--width", "ffn@3=8", "--width", "moe_ffn@1=8"], 2, "axis moe_ffn keeps 8 on layer 1, 16 on layer 6")]
#[case::layer(&["--drop-layer", "9"], 2, "depth on layer 9: the model has 7 layers")]
#[case::top_k(&["--width", "experts=1"], 2, "moe_router_topk = 2 is more than num_moe_experts = 1")]
#[case::no_elastifier(&["--budget", "0.5"], 2, "the recipe of the checkpoint has no elastifier")]
fn what_cannot_be_cut_is_refused(#[case] more: &[&str], #[case] status: i32, #[case] words: &str) {
    let output = slice("refused", more);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(text.contains(words), "{text}");
    assert!(!trained().path().join("refused").exists());
}

#[test]
fn what_is_there_is_not_replaced() {
    let folder = trained().path().join("there");
    std::fs::create_dir(&folder).unwrap();
    let output = slice("there", &["--width", "ffn=8"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is there already"));
    assert!(std::fs::read_dir(&folder).unwrap().next().is_none());
}

/// The elastifier of the checkpoint's recipe says what a budget means.
#[test]
fn a_budget_is_the_elastifiers() {
    let plugins = fixture("elastic-test").parent().unwrap().to_path_buf();
    let widths = "{axis: ffn, state: {slice: {n: 3}}}, {axis: depth, layer: 1, state: {slice: {n: 0}}}";
    let recipe = format!(
        "name: tiny\nplugins: [{}]\nmodules: {{lm: {{provider: tiny, config: {{layers: 3, vocab: 16}}, elastify: \
         {{provider: scripted, config: {{widths: [{{budget: 0.5, settings: [{widths}]}}]}}}}}}}}\n\
         data: {{synthetic: {{vocab: 16, document_length: 10, tokens: 1000}}}}\noptimizer: {{lr: 0.01}}\n\
         train: {{steps: 2, seq_length: 8, global_batch_size: 2}}\n",
        plugins.join(file_name("elastic-test")).display()
    );
    let runs = Runs::of(&recipe);
    runs.train("run", "2", &[]);
    let slice =
        |budget: &str| runs.gantry(&["slice", "--checkpoint", "run", "--out", "half", "--budget", budget, "--json"]);
    let output = slice("0.4");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no widths for budget 0.4"));
    let output = slice("0.5");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["config"], serde_json::json!({"layers": 2, "hidden": 8, "ffn": 3}));
    // The embedding of 16 x 8, which is the output too, three norms of 8, two layers of 2 x 3 x 8.
    assert_eq!(report["parameters"], 16 * 8 + 3 * 8 + 2 * 2 * 3 * 8);
    // The smaller model is a plain one.
    let plan = runs.gantry(&["plan", "half/recipe.yaml", "--json"]);
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
    assert!(!std::fs::read_to_string(runs.path().join("half/recipe.yaml")).unwrap().contains("scripted"));
}
