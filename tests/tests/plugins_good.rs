//! A well-behaved plugin through a library: plan, forward, elastifier, hooks.

use gantry::plugin::{PluginFile, PluginSet};
use gantry_plugin_api::plan::{AxisSetting, AxisState, MicroBatchInfo, Stage};
use gantry_plugin_api::sdk::HookEvent;
use gantry_tests::plugins::fixture;
use gantry_tests::test_host::TestHost;
use serde_json::json;

fn set() -> PluginSet {
    let mut set = PluginSet::default();
    set.add_file(&PluginFile { allow_writable: true, ..PluginFile::new(fixture("elastic-test")) }).unwrap();
    set
}

#[test]
fn a_plan_and_a_forward_come_through() {
    let set = set();
    let provider = set.provider("tiny", &json!({"layers": 2, "ffn": 32})).unwrap();
    let plan = provider.plan().unwrap();
    assert_eq!((plan.params.len(), plan.axes[1].size, plan.blocks.len()), (8, 32, 4));
    let stage = provider.build(&Stage { begin: 0, end: 4 }).unwrap();
    let mut host = TestHost::new(&plan);
    host.skip_layer = Some(0);
    stage.forward(&mut host).unwrap();
    let expect = [
        "embedding embedding",
        "role Embedding",
        "begin layer",
        "role MixerInput",
        "norm rms_norm",
        "fc1 linear",
        "act activation",
        "role FfnHidden",
        "fc2 linear",
        "role MixerOutput",
        "residual add",
        "end",
        "final_norm rms_norm",
        "output logits",
    ];
    assert_eq!(host.lines, expect);
    let half = provider.build(&Stage { begin: 0, end: 2 }).map(drop).unwrap_err().to_string();
    assert_eq!(half, "tiny: tiny is built whole");
}

fn info(micro_batch: u64) -> MicroBatchInfo {
    MicroBatchInfo::new(1, micro_batch, 0, 1, true)
}

#[test]
fn an_elastifier_sets_states_from_its_recipe() {
    let set = set();
    let plan = set.provider("tiny", &json!({"layers": 2})).unwrap().plan().unwrap();
    let config = json!({
        "per_micro_batch": [
            [{"axis": "ffn", "layer": 1, "state": {"hard": {"n": 4, "gain": 0.5}}}],
            [{"axis": "hidden", "state": {"soft": {"choices": [8, 4], "p": [0.25, 0.75]}}}],
            [],
        ],
        "widths": [{"budget": 0.5, "settings": [{"axis": "hidden", "state": {"slice": {"n": 4}}}]}],
    });
    let mut elastic = set.elastifier("scripted", &config).unwrap();
    assert_eq!(elastic.plan(&plan).unwrap().roles, None);
    let hard = AxisSetting { axis: "ffn".into(), layer: Some(1), state: AxisState::Hard { n: 4, gain: 0.5 } };
    assert_eq!(elastic.begin_micro_batch(&info(3)).unwrap(), [hard]);
    let soft = AxisState::Soft { choices: vec![8, 4], p: vec![0.25, 0.75] };
    assert_eq!(elastic.begin_micro_batch(&info(1)).unwrap()[0].state, soft);
    assert_eq!(elastic.begin_micro_batch(&info(2)).unwrap(), []);
    assert_eq!(elastic.widths(0.5).unwrap()[0].state, AxisState::Slice { n: 4 });
    assert!(elastic.widths(0.7).unwrap_err().to_string().contains("no widths for budget 0.7"));

    let config = json!({"settings": [{"axis": "vocab", "state": {"slice": {"n": 4}}}]});
    let e = set.elastifier("scripted", &config).unwrap().plan(&plan).unwrap_err().to_string();
    assert_eq!(e, "scripted: the target has no elastic axis \"vocab\"");
}

#[test]
fn hooks_keep_their_state_through_a_checkpoint() {
    let set = set();
    let mut host = TestHost::new(&Default::default());
    let mut hooks = set.hooks("counting", &json!({})).unwrap();
    hooks.report(HookEvent::StepEnd, &mut host, 7, &json!({"lm_loss": 2.5})).unwrap();
    assert_eq!(host.lines, ["log Info counting: step 7 seen"]);
    let state = hooks.save().unwrap();
    assert_eq!(state, json!({"steps": 1, "last_loss": 2.5, "events": []}));
    let mut resumed = set.hooks("counting", &serde_json::Value::Null).unwrap();
    resumed.load(&state).unwrap();
    resumed.report(HookEvent::StepEnd, &mut host, 8, &json!({"lm_loss": 2.0})).unwrap();
    assert_eq!(resumed.save().unwrap()["steps"], 2);
    let torn = gantry::failure::Failure::from(resumed.load(&json!({})).unwrap_err());
    assert_eq!((torn.sentence.as_str(), torn.exit_status()), ("counting: no steps in the state", 4));
}

#[test]
fn ranks_have_instances_of_their_own() {
    let set = set();
    let plan = set.provider("tiny", &json!({"layers": 1})).unwrap().plan().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let provider = set.provider("tiny", &json!({"layers": 1})).unwrap();
                let stage = provider.build(&Stage { begin: 0, end: 3 }).unwrap();
                for _ in 0..100 {
                    stage.forward(&mut TestHost::quiet(&plan)).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_custom_operator_computes_on_the_hosts_buffers() {
    use gantry_plugin_api::abi::custom::{In, Out};
    use gantry_plugin_api::sdk::custom::{Placement, Shape};
    let _set = set();
    let cap = 2.0;
    let op = gantry::plugin::custom::instance("elastic-test.softcap", r#"{"cap": 2.0}"#).unwrap();
    let (rows, cols, ld) = (40, 3, 5);
    let shapes = op.shapes(&[Shape { rows, cols }, Shape { rows: 1, cols }]).unwrap();
    assert_eq!((shapes.placement, shapes.shapes.outputs.len()), (Placement::Rows, 1));
    // x is a window of a wider buffer: rows 5 apart, the last one ends early.
    let x: Vec<f64> = (0..(rows - 1) * ld + cols).map(|i| (i as f64 * 0.37).sin() * 4.0).collect();
    let w = [0.5, 1.0, -1.5];
    let (mut y, mut tanh) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
    let ins = [In { data: &x, rows, cols, ld }, In { data: &w, rows: 1, cols, ld: cols }];
    fn out(data: &mut [f64], rows: usize) -> Out<'_, f64> {
        let cols = data.len() / rows;
        Out { data, rows, cols, ld: cols }
    }
    op.forward::<f64>(&ins, &mut [out(&mut y, rows)], &mut [out(&mut tanh, rows)], &mut []).unwrap();
    for i in 0..rows {
        for c in 0..cols {
            let expect = cap * (x[i * ld + c] * w[c] / cap).tanh();
            assert!((y[i * cols + c] - expect).abs() < 1e-14);
        }
    }
    let dy = vec![1.0; rows * cols];
    let (mut dx, mut dw) = (vec![f64::NAN; rows * cols], vec![f64::NAN; cols]);
    let saved = [In { data: &tanh, rows, cols, ld: cols }];
    let dys = [In { data: &dy, rows, cols, ld: cols }];
    let grads = &mut [out(&mut dx, rows), out(&mut dw, 1)];
    op.backward::<f64>(&ins, &saved, &dys, grads, &mut []).unwrap();
    let slope = |i: usize, c: usize| 1.0 - (x[i * ld + c] * w[c] / cap).tanh().powi(2);
    for c in 0..cols {
        let expect: f64 = (0..rows).map(|i| slope(i, c) * x[i * ld + c]).sum();
        assert!((dw[c] - expect).abs() < 1e-12);
        assert!((0..rows).all(|i| (dx[i * cols + c] - slope(i, c) * w[c]).abs() < 1e-14));
    }
    let short = [In { data: &x[..10], rows, cols, ld }, ins[1]];
    let e = op.forward::<f64>(&short, &mut [], &mut [], &mut []).unwrap_err().to_string();
    assert_eq!(e, "40 rows of 3, 5 apart, do not fit into 10 elements");
}
