//! `gantry convert`: what goes through it comes back byte for byte, and what is broken is refused in one sentence.

use gantry::checkpoint::CheckpointReader;
use gantry::convert::{self, Format, INDEX, Report, Request, SINGLE, Wanted};
use gantry::failure::{Failure, Result};
use gantry_tests::goldens::hybrid_hf::{configs, request, with_config};
use gantry_tests::plugins::providers;
use proptest::prelude::*;
use rstest::rstest;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use Format::{Gantry, HuggingFace, Megatron};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/hf_nemotron_h_tiny")
}

fn convert(request: &Request) -> Result<Report> {
    convert::run(request, &providers(&["nemotron-hybrid", "dense-gpt"]))
}

/// A conversion that must work.
fn go(from: Format, to: Format, source: &Path, destination: &Path) -> Report {
    convert(&request(from, to, source, destination)).unwrap_or_else(|failure| panic!("{failure}"))
}

type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Every tensor of a folder's files.
fn tensors(folder: &Path) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                assert!(all.insert(name.clone(), tensor).is_none(), "{name} stands twice");
            }
        }
    }
    all
}

fn write(folder: &Path, tensors: &BTreeMap<String, Tensor>) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(folder.join(SINGLE), serialize(views, None).unwrap()).unwrap();
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

#[test]
fn a_folder_comes_back_byte_for_byte_by_every_way_and_in_both_spellings() {
    let before = tensors(&golden());
    for config in configs(&golden()) {
        let source = with_config(&golden(), &config);
        let here = tempfile::tempdir().unwrap();
        let at = |name: &str| here.path().join(name);
        go(HuggingFace, Gantry, source.path(), &at("checkpoint"));
        go(Gantry, HuggingFace, &at("checkpoint"), &at("folder"));
        assert_eq!(tensors(&at("folder")), before);
        go(HuggingFace, Megatron, &at("folder"), &at("megatron"));
        go(Megatron, Gantry, &at("megatron"), &at("again"));
        go(Gantry, Megatron, &at("again"), &at("twice"));
        assert_eq!(tensors(&at("twice")), tensors(&at("megatron")));
        go(Megatron, HuggingFace, &at("twice"), &at("back"));
        assert_eq!(tensors(&at("back")), before);
        go(HuggingFace, HuggingFace, &at("back"), &at("copy"));
        assert_eq!(tensors(&at("copy")), before);
        assert!(std::fs::read_dir(here.path()).unwrap().count() == 7, "something was left beside");
    }
}

#[test]
fn names_of_megatron_are_those_of_its_golden() {
    let here = tempfile::tempdir().unwrap();
    go(HuggingFace, Megatron, &golden(), &here.path().join("m"));
    let ours = tensors(&here.path().join("m"));
    let case = std::fs::read(golden().parent().unwrap().join("hybrid_tiny_megatron.safetensors")).unwrap();
    let case = SafeTensors::deserialize(&case).unwrap();
    // Layers of the golden ME*ME; ours are M*E-ME: the same kinds at other places.
    let general = |name: &str| {
        name.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part }).collect::<Vec<_>>().join(".")
    };
    let theirs: Vec<String> = case.names().iter().filter_map(|name| name.strip_prefix("w.").map(general)).collect();
    let mlp = |name: &str| name.starts_with("decoder.layers.3.mlp");
    for name in ours.keys().filter(|name| !mlp(name)) {
        assert!(theirs.contains(&general(name)), "Megatron has no {name}");
    }
    for name in &theirs {
        assert!(ours.keys().any(|ours| general(ours) == *name), "{name} is missing");
    }
}

#[test]
fn sharded_files_are_written_and_read() {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    go(HuggingFace, Gantry, &golden(), &at("checkpoint"));
    let small = Request { shard_bytes: 100_000, ..request(Gantry, HuggingFace, &at("checkpoint"), &at("folder")) };
    convert(&small).unwrap();
    let index: Value = serde_json::from_slice(&std::fs::read(at("folder").join(INDEX)).unwrap()).unwrap();
    let before = tensors(&golden());
    assert_eq!(tensors(&at("folder")), before);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), before.len());
    let bytes: usize = before.values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
    let files = index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap());
    let files: std::collections::BTreeSet<&str> = files.collect();
    assert!(files.len() > 5 && files.contains(format!("model-00001-of-{:05}.safetensors", files.len()).as_str()));
    for file in files {
        let size = std::fs::metadata(at("folder").join(file)).unwrap().len();
        assert!(size < 110_000, "{file} has {size} bytes");
    }
    go(HuggingFace, Gantry, &at("folder"), &at("again"));
    go(Gantry, HuggingFace, &at("again"), &at("back"));
    assert_eq!(tensors(&at("back")), before);
}

/// A bf16 copy of the golden; what `keeps` says stays fp32.
fn narrow(folder: &Path, keeps: impl Fn(&str) -> bool) -> BTreeMap<String, Tensor> {
    let mut all = tensors(&golden());
    for (name, (dtype, _, bytes)) in &mut all {
        if !keeps(name) {
            let halves = bytes.chunks(4).flat_map(|b| [b[2], b[3]]);
            (*dtype, *bytes) = (Dtype::BF16, halves.collect());
        }
    }
    std::fs::copy(golden().join("config.json"), folder.join("config.json")).unwrap();
    write(folder, &all);
    all
}

#[rstest]
#[case::all(&[])]
#[case::as_transformers_saves_them(&["gate.weight", "gate.e_score_correction_bias"])]
#[case::scan_in_fp32(&["A_log", ".D"])]
fn bf16_comes_back_as_it_was(#[case] wide: &[&str]) {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    std::fs::create_dir(at("source")).unwrap();
    let before = narrow(&at("source"), |name| wide.iter().any(|end| name.ends_with(end)));
    go(HuggingFace, Gantry, &at("source"), &at("checkpoint"));
    // What is trained on is fp32.
    let reader = CheckpointReader::open(&at("checkpoint")).unwrap();
    assert!(reader.index().tensors.iter().all(|tensor| tensor.dtype == "F32"));
    for wanted in [Wanted::Keep, Wanted::Bf16] {
        let back = at(&format!("{wanted:?}"));
        convert(&Request { wanted, ..request(Gantry, HuggingFace, &at("checkpoint"), &back) }).unwrap();
        assert!(tensors(&back) == before, "{wanted:?}");
        assert_eq!(config(&back)["torch_dtype"], "bfloat16");
    }
    let wide = Request { wanted: Wanted::F32, ..request(Gantry, HuggingFace, &at("checkpoint"), &at("wide")) };
    convert(&wide).unwrap();
    assert!(tensors(&at("wide")).values().all(|(dtype, ..)| *dtype == Dtype::F32));
}

#[test]
fn fp32_to_bf16_keeps_what_is_fp32_in_training() {
    let here = tempfile::tempdir().unwrap();
    let wanted =
        Request { wanted: Wanted::Bf16, ..request(HuggingFace, HuggingFace, &golden(), &here.path().join("f")) };
    convert(&wanted).unwrap();
    let fp32: Vec<String> = tensors(&here.path().join("f"))
        .into_iter()
        .filter_map(|(name, (dtype, ..))| (dtype == Dtype::F32).then_some(name))
        .collect();
    let of = |name: &str| ["A_log", "D", "dt_bias", "e_score_correction_bias"].iter().any(|end| name.ends_with(end));
    assert!(fp32.len() == 8 && fp32.iter().all(|name| of(name)), "{fp32:?}");
}

#[test]
fn the_config_that_is_written_is_read_to_the_same() {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    let first = go(HuggingFace, Gantry, &golden(), &at("a"));
    go(Gantry, HuggingFace, &at("a"), &at("folder"));
    let second = go(HuggingFace, Gantry, &at("folder"), &at("b"));
    let mut expected = first.config;
    // Initial time steps are no part of what such folders hold of a model without a limit.
    expected.as_object_mut().unwrap().remove("mamba_dt_min");
    assert_eq!(second.config, expected);
    assert_eq!(second.notes, Vec::<String>::new());
    let (ours, theirs) = (config(&at("folder")), config(&golden()));
    for key in ["bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
}

/// The folder with a changed config.
fn changed(changes: Value) -> tempfile::TempDir {
    let copy = with_config(&golden(), &golden().join("config.json"));
    let mut config = config(copy.path());
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::String(gone) if gone == "(gone)" => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    copy
}

fn refused(folder: &Path) -> Failure {
    let destination = folder.join("destination");
    let failure = convert(&request(HuggingFace, Gantry, folder, &destination)).unwrap_err();
    assert!([2, 4].contains(&failure.exit_status()), "{failure}");
    assert!(!destination.exists());
    let beside = std::fs::read_dir(folder).unwrap().any(|entry| {
        let name = entry.unwrap().file_name();
        name.to_string_lossy().starts_with('.')
    });
    assert!(!beside, "something was left beside");
    failure
}

#[rstest]
#[case(json!({"use_bias": true}), "`use_bias` is true")]
#[case(json!({"mlp_bias": true}), "`mlp_bias` is true")]
#[case(json!({"attention_bias": true}), "`attention_bias` is true")]
#[case(json!({"mamba_proj_bias": true}), "`mamba_proj_bias` is true")]
#[case(json!({"use_conv_bias": false}), "`use_conv_bias` is false")]
#[case(json!({"mlp_hidden_act": "silu"}), "`mlp_hidden_act` is \"silu\"")]
#[case(json!({"mamba_hidden_act": "gelu"}), "`mamba_hidden_act` is \"gelu\"")]
#[case(json!({"num_nextn_predict_layers": 1}), "`num_nextn_predict_layers` is 1")]
#[case(json!({"residual_in_fp32": true}), "`residual_in_fp32` is true")]
#[case(json!({"attention_dropout": 0.1}), "`attention_dropout` is 0.1")]
#[case(json!({"sliding_window": 128}), "`sliding_window` is 128")]
#[case(json!({"moe_latent_size": 32}), "`moe_latent_size` is 32")]
#[case(json!({"n_group": 2}), "`n_group` is 2")]
#[case(json!({"n_shared_experts": 2}), "`n_shared_experts` is 2")]
#[case(json!({"norm_topk_prob": false}), "`norm_topk_prob` is false")]
#[case(json!({"time_step_limit": [0.0, 0.5]}), "`time_step_limit` is [0.0,0.5]")]
#[case(json!({"time_step_limit": [0.0, {"__float__": "NaN"}]}), "expected two numbers")]
#[case(json!({"layer_norm_epsilon": {"__float__": "NaN"}}), "`layer_norm_epsilon` is {\"__float__\":\"NaN\"}")]
#[case(json!({"layer_norm_epsilon": -1.0}), "layernorm_epsilon is -1")]
#[case(json!({"hidden_size": "64"}), "`hidden_size` is \"64\"; invalid type")]
#[case(json!({"hidden_size": 1e30}), "`hidden_size` is 1e+30")]
#[case(json!({"hidden_size": 18446744073709551615u64}), "hidden_size is 18446744073709551615")]
#[case(json!({"num_hidden_layers": 7}), "`num_hidden_layers` is 7")]
#[case(json!({"hybrid_override_pattern": "M*E-MM"}), "layers_block_type says M*E-ME")]
#[case(json!({"layers_block_type": ["mamba", "rnn"]}), "\"rnn\" is no layer")]
#[case(json!({"mamba_n_groups": 3}), "`mamba_n_groups` is 3; `n_groups`, another name for it, is 2")]
#[case(json!({"rope_scaling": {"type": "yarn"}}), "`rope_scaling` is {\"type\":\"yarn\"}; the key is not known")]
#[case(json!({"quantization_config": {"bits": 4}}), "`quantization_config`")]
#[case(json!({"model_type": "llama"}), "`model_type` is \"llama\", which no plugin declares; known: nemotron_h")]
#[case(json!({"architectures": ["NemotronHForVideo"]}), "`architectures` is [\"NemotronHForVideo\"]")]
fn configs_of_other_models_are_refused_by_name(#[case] changes: Value, #[case] expected: &str) {
    let folder = changed(changes);
    let failure = refused(folder.path());
    assert!(failure.sentence.contains(expected), "{failure}");
    assert!(failure.sentence.contains("config.json"), "{failure}");
}

#[rstest]
#[case::another_activation(json!({"mlp_hidden_act": "gelu_pytorch_tanh"}), "activation", json!("gelu"))]
#[case::epsilon_of_both_norms(json!({"layer_norm_epsilon": 0.001}), "mamba_norm_epsilon", json!(0.001))]
#[case::a_limit(
    json!({"time_step_limit": [0.25, {"__float__": "Infinity"}], "time_step_min": 0.25}), "mamba_dt_limit_min", json!(0.25)
)]
#[case::old_names(
    json!({"layers_block_type": ["mamba", "attention", "moe", "mlp", "mamba", "moe"]}), "pattern", json!("M*E-ME")
)]
#[case::heads(json!({"mamba_d_conv": 4, "conv_kernel": "(gone)"}), "mamba_conv_width", json!(4))]
fn what_the_config_says_is_mapped(#[case] changes: Value, #[case] key: &str, #[case] expected: Value) {
    let folder = changed(changes.clone());
    let there = folder.path().join("there");
    let report = go(HuggingFace, Gantry, folder.path(), &there);
    assert_eq!(report.config[key], expected);
    // And back to what transformers takes for the same.
    go(Gantry, HuggingFace, &there, &folder.path().join("back"));
    let back = config(&folder.path().join("back"));
    for (key, value) in changes
        .as_object()
        .unwrap()
        .iter()
        .filter(|(key, value)| !key.contains("block") && **value != "(gone)" && back.get(key).is_some())
    {
        assert_eq!(back[key], *value, "{key}");
    }
}

#[test]
fn a_key_may_be_left_out_and_a_key_of_the_provider_set() {
    let folder = changed(json!({"vision_tower": "x"}));
    let request = Request {
        ignore: vec!["vision_tower".into()],
        set: json!({"mamba_dt_limit_min": 0.001}).as_object().unwrap().clone(),
        ..request(HuggingFace, Gantry, folder.path(), &folder.path().join("there"))
    };
    assert_eq!(convert(&request).unwrap().config["mamba_dt_limit_min"], 0.001);
    let wrong = Request { ignore: vec!["vision".into()], force: true, ..request };
    assert!(convert(&wrong).unwrap_err().sentence.contains("has no such key"));
}

#[test]
fn tied_embeddings_are_written_under_both_names_and_must_agree() {
    let folder = changed(json!({"tie_word_embeddings": true}));
    let (embedding, head) = ("backbone.embeddings.weight", "lm_head.weight");
    let failure = refused(folder.path());
    assert!(failure.sentence.ends_with("tensor lm_head.weight differs from the one that it is tied to"), "{failure}");
    let mut all = tensors(folder.path());
    all.insert(head.into(), all[embedding].clone());
    write(folder.path(), &all);
    let there = folder.path().join("there");
    go(HuggingFace, Gantry, folder.path(), &there);
    go(Gantry, HuggingFace, &there, &folder.path().join("both"));
    assert_eq!(tensors(&folder.path().join("both")), all);
    // The second name may be left out.
    let mut one = all.clone();
    one.remove(head);
    write(folder.path(), &one);
    go(HuggingFace, HuggingFace, folder.path(), &folder.path().join("again"));
    assert_eq!(tensors(&folder.path().join("again")), all);
}

#[test]
fn what_other_models_have_is_not_written() {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    go(HuggingFace, Gantry, &golden(), &at("checkpoint"));
    for (set, expected) in [
        (json!({"mamba_norm_epsilon": 0.5}), "config.mamba_norm_epsilon: nemotron_h has one epsilon"),
        (json!({"position_embedding_type": "rope"}), "config.position_embedding_type"),
        (json!({"moe_router_score_function": "softmax"}), "config.moe_router_score_function"),
        (json!({"moe_expert_capacity_factor": 1.0}), "config.moe_expert_capacity_factor"),
    ] {
        let set = set.as_object().unwrap().clone();
        let failure =
            convert(&Request { set, ..request(Gantry, HuggingFace, &at("checkpoint"), &at("f")) }).unwrap_err();
        assert!(failure.sentence.contains(expected), "{failure}");
        assert_eq!(failure.exit_status(), 4);
        assert!(!at("f").exists());
    }
}

#[test]
fn a_router_without_a_bias_is_written_with_zeros() {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    go(HuggingFace, Megatron, &golden(), &at("m"));
    let mut all = tensors(&at("m"));
    all.retain(|name, _| !name.ends_with("expert_bias"));
    write(&at("m"), &all);
    let set = json!({"moe_router_enable_expert_bias": false}).as_object().unwrap().clone();
    convert(&Request { set, ..request(Megatron, HuggingFace, &at("m"), &at("f")) }).unwrap();
    let bias = &tensors(&at("f"))["backbone.layers.2.mixer.gate.e_score_correction_bias"];
    assert_eq!(*bias, (Dtype::F32, vec![8], vec![0; 32]));
}

#[test]
fn a_destination_is_replaced_only_when_asked_and_only_by_all_of_it() {
    let here = tempfile::tempdir().unwrap();
    let at = |name: &str| here.path().join(name);
    go(HuggingFace, Gantry, &golden(), &at("c"));
    let again = request(HuggingFace, Gantry, &golden(), &at("c"));
    let failure = convert(&again).unwrap_err();
    assert!(failure.sentence.ends_with("is there already") && failure.to_string().contains("--force"), "{failure}");
    convert(&Request { force: true, ..again.clone() }).unwrap();
    // What fails leaves what was there.
    let broken = changed(json!({}));
    let mut all = tensors(broken.path());
    all.get_mut("lm_head.weight").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(broken.path(), &all);
    let failure = convert(&Request { source: broken.path().into(), force: true, ..again.clone() }).unwrap_err();
    assert!(failure.sentence.contains("element 0 of tensor lm_head.weight is NaN"), "{failure}");
    CheckpointReader::open(&at("c")).unwrap();
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 1);
    // Nor is anything replaced that is no model, or that holds the source.
    std::fs::create_dir(at("mine")).unwrap();
    std::fs::write(at("mine").join("thesis.tex"), "x").unwrap();
    let failure = convert(&Request { force: true, destination: at("mine"), ..again.clone() }).unwrap_err();
    assert!(failure.sentence.ends_with("holds no model, so that --force does not replace it"), "{failure}");
    let itself = Request { force: true, ..request(Gantry, HuggingFace, &at("c"), &at("c")) };
    assert!(convert(&itself).unwrap_err().sentence.ends_with("holds the source"));
}

#[test]
fn a_provider_without_folders_says_so() {
    let here = tempfile::tempdir().unwrap();
    let recipe = "name: d\nmodules: {lm: {provider: dense-gpt, config: {num_layers: 1, hidden_size: 8, \
                  num_attention_heads: 2, ffn_hidden_size: 8, vocab_size: 16}}}\ndata: {paths: [x]}\n\
                  train: {steps: 1, seq_length: 4, global_batch_size: 1}\noptimizer: {lr: 1}\n";
    std::fs::write(here.path().join("recipe.yaml"), recipe).unwrap();
    write(here.path(), &tensors(&golden()));
    let failure = convert(&request(Megatron, HuggingFace, here.path(), &here.path().join("f"))).unwrap_err();
    assert_eq!(failure.sentence, "dense-gpt: this provider declares no Hugging Face folders");
    let failure = convert(&request(Megatron, Gantry, here.path(), &here.path().join("f"))).unwrap_err();
    assert!(failure.sentence.contains("is missing"), "{failure}");
}

// What is broken.

#[rstest]
#[case::missing(&|all: &mut BTreeMap<String, Tensor>| drop(all.remove("lm_head.weight")), "tensor lm_head.weight is missing")]
#[case::foreign(
    &|all: &mut BTreeMap<String, Tensor>| drop(all.insert("mtp.x".into(), (Dtype::F32, vec![1], vec![0; 4]))),
    "tensor mtp.x in model.safetensors is not the model's"
)]
#[case::shape(
    &|all: &mut BTreeMap<String, Tensor>| all.get_mut("lm_head.weight").unwrap().1 = vec![64, 256],
    "tensor lm_head.weight in model.safetensors has shape [64, 256], the model needs [256, 64]"
)]
#[case::type_of_elements(
    &|all: &mut BTreeMap<String, Tensor>| all.get_mut("lm_head.weight").unwrap().0 = Dtype::I32,
    "tensor lm_head.weight in model.safetensors has type I32; F32, BF16, F16 or F64 can be read"
)]
fn tensors_of_another_model_are_refused_by_name(
    #[case] change: &dyn Fn(&mut BTreeMap<String, Tensor>),
    #[case] expected: &str,
) {
    let folder = changed(json!({}));
    let mut all = tensors(folder.path());
    change(&mut all);
    write(folder.path(), &all);
    assert!(refused(folder.path()).sentence.ends_with(expected));
}

/// The golden over two files, with a changed index.
fn sharded(index: impl Fn(&mut Value)) -> tempfile::TempDir {
    let folder = changed(json!({}));
    let there = folder.path().join("sharded");
    let small = Request { shard_bytes: 400_000, ..request(HuggingFace, HuggingFace, folder.path(), &there) };
    convert(&small).unwrap();
    std::fs::remove_file(folder.path().join(SINGLE)).unwrap();
    for entry in std::fs::read_dir(&there).unwrap() {
        let path = entry.unwrap().path();
        std::fs::rename(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::remove_dir(there).unwrap();
    let path = folder.path().join(INDEX);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index(&mut value);
    std::fs::write(&path, value.to_string()).unwrap();
    folder
}

#[rstest]
#[case::outside("../model-00001-of-00002.safetensors", "no plain file name")]
#[case::absolute("/etc/passwd", "no plain file name")]
#[case::below("a/b.safetensors", "no plain file name")]
#[case::above("..", "no plain file name")]
#[case::nothing("", "no plain file name")]
#[case::not_there("model-00003-of-00002.safetensors", "names model-00003-of-00002.safetensors, which is not there")]
#[case::other("model-00002-of-00002.safetensors", "which model.safetensors.index.json does not place there")]
fn an_index_that_names_other_files_is_refused(#[case] file: &str, #[case] expected: &str) {
    let folder = sharded(|index| index["weight_map"]["backbone.embeddings.weight"] = file.into());
    let failure = refused(folder.path());
    assert!(failure.sentence.contains(expected), "{failure}");
}

#[test]
fn an_index_and_its_files_list_the_same() {
    let more = sharded(|index| index["weight_map"]["x"] = "model-00001-of-00002.safetensors".into());
    let failure = refused(more.path());
    let expected = "lists tensor x, which is not in model-00001-of-00002.safetensors";
    assert!(failure.sentence.ends_with(expected), "{failure}");
    let less = sharded(|index| drop(index["weight_map"].as_object_mut().unwrap().remove("lm_head.weight")));
    assert!(refused(less.path()).sentence.contains("holds tensor lm_head.weight, which"));
    let none = sharded(|index| index["weight_map"] = json!([]));
    assert!(refused(none.path()).sentence.ends_with("`weight_map` lists no tensors"));
    let number = sharded(|index| index["weight_map"]["lm_head.weight"] = 3.into());
    assert!(refused(number.path()).sentence.ends_with("the file of tensor lm_head.weight is 3"));
    let twice = sharded(|_| {});
    let text = std::fs::read_to_string(twice.path().join(INDEX)).unwrap();
    let line = "\"lm_head.weight\":\"model-00001-of-00002.safetensors\",";
    std::fs::write(twice.path().join(INDEX), text.replace("\"weight_map\":{", &format!("\"weight_map\":{{{line}")))
        .unwrap();
    let failure = refused(twice.path());
    assert!(failure.sentence.contains("key \"lm_head.weight\" stands twice"), "{failure}");
}

#[test]
fn headers_that_lie_are_refused() {
    let lie = |header: &str, bytes: usize| {
        let folder = changed(json!({}));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + bytes, 0);
        std::fs::write(folder.path().join(SINGLE), file).unwrap();
        refused(folder.path()).sentence
    };
    for (header, bytes, expected) in [
        ("", 0, "its header"),
        ("[]", 0, "its header"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4, "is no safetensors file"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 8, "describes 4 bytes of tensors, 8 follow"),
        (r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#, 8, "describes 16 bytes of tensors, 8 follow"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8, "is no safetensors file"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}"#, 8, "is no safetensors file"),
        (r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#, 4, "is no safetensors file"),
        (
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}"#,
            4,
            "is no safetensors file",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            "key \"a\" stands twice",
        ),
    ] {
        let sentence = lie(header, bytes);
        assert!(sentence.contains(expected), "{header}: {sentence}");
    }
    for bytes in [&b""[..], b"1234567", &[0xff; 64], &[0; 8]] {
        let folder = changed(json!({}));
        std::fs::write(folder.path().join(SINGLE), bytes).unwrap();
        assert!(refused(folder.path()).sentence.contains("is no safetensors file"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Wherever a file ends, and whatever byte of its header is another one.
    #[test]
    fn a_damaged_file_is_refused(cut in 0usize..666_000, at in 0usize..9000, bit in 0u8..8) {
        let folder = changed(json!({}));
        let whole = std::fs::read(golden().join(SINGLE)).unwrap();
        std::fs::write(folder.path().join(SINGLE), &whole[..cut.min(whole.len() - 1)]).unwrap();
        refused(folder.path());
        let mut flipped = whole.clone();
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let at = at % (8 + header);
        flipped[at] ^= 1 << bit;
        std::fs::write(folder.path().join(SINGLE), &flipped).unwrap();
        // A space may become another, and a digit of unread metadata; then the tensors are those that were there.
        let there = folder.path().join("there");
        match convert(&request(HuggingFace, HuggingFace, folder.path(), &there)) {
            Ok(_) => {
                let spaces: Vec<_> = tensors(&there).into_keys().collect();
                prop_assert_eq!(spaces, tensors(&golden()).into_keys().collect::<Vec<_>>());
            }
            Err(failure) => prop_assert!([2, 4].contains(&failure.exit_status()), "{}", failure),
        }
    }

    /// A config of any text.
    #[test]
    fn a_damaged_config_is_refused(at in 0usize..1600, byte in any::<u8>()) {
        let folder = changed(json!({}));
        let path = folder.path().join("config.json");
        let mut text = std::fs::read(&path).unwrap();
        let at = at % text.len();
        text[at] = byte;
        std::fs::write(&path, &text).unwrap();
        if let Err(failure) = convert(&request(HuggingFace, Gantry, folder.path(), &folder.path().join("there"))) {
            prop_assert!([2, 4].contains(&failure.exit_status()), "{}", failure);
        }
        std::fs::write(&path, &text[..at]).unwrap();
        refused(folder.path());
    }
}

#[test]
fn a_run_is_exported_with_its_tokens_and_without_its_optimizer() {
    let here = tempfile::tempdir().unwrap();
    let recipe = "name: small\nmodules: {lm: {provider: nemotron-hybrid, config: {pattern: M-, hidden_size: 16, vocab_size: 260, \
                  ffn_hidden_size: 16, mamba_num_heads: 2, mamba_head_dim: 16, mamba_num_groups: 1, mamba_state_dim: 8}}}\n\
                  data: {paths: [text.txt]}\ntrain: {steps: 1, seq_length: 16, global_batch_size: 1}\n\
                  optimizer: {lr: 1.0e-3}\n";
    std::fs::write(here.path().join("r.yaml"), recipe).unwrap();
    std::fs::write(here.path().join("text.txt"), "Some text to train on for a step.\n".repeat(4)).unwrap();
    providers(&["nemotron-hybrid"]);
    let gantry = |arguments: &str| {
        let mut command = std::process::Command::new(gantry_tests::plugins::gantry());
        command.current_dir(here.path()).args(arguments.split(' ')).env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    gantry("train r.yaml --run-dir run");
    let said = gantry("convert --from gantry --to hf run folder");
    assert!(said.contains("tensors of optimizer state are left out"), "{said}");
    assert!(said.contains("note: tokens 257 to 259 are padding of the vocabulary"), "{said}");
    let folder = here.path().join("folder");
    let written = config(&folder);
    assert_eq!((&written["eos_token_id"], &written["vocab_size"]), (&json!(256), &json!(260)));
    assert_eq!(written["max_position_embeddings"], 16);
    let generation = std::fs::read(folder.join("generation_config.json")).unwrap();
    let generation: Value = serde_json::from_slice(&generation).unwrap();
    assert_eq!(generation["suppress_tokens"], json!([257, 258, 259]));
    let tokenizer: Value = serde_json::from_slice(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
    assert_eq!(tokenizer["model"]["vocab"].as_object().unwrap().len(), 257);
    // The checkpoint alone keeps its tokenizer, and writes text at once; so does what comes back from the folder.
    gantry("convert --from gantry --to gantry run alone");
    gantry("convert --from hf --to gantry folder again");
    for checkpoint in ["alone", "again"] {
        gantry(&format!("generate --checkpoint {checkpoint} --prompt So --tokens 3"));
        gantry(&format!(
            "eval {checkpoint}/recipe.yaml --checkpoint {checkpoint} --data text.txt --logits {checkpoint}.logits"
        ));
    }
    let logits = |name: &str| {
        let bytes = std::fs::read(here.path().join(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let view = file.tensor("logits").unwrap();
        (view.shape()[1], view.data()[..16 * 260 * 4].to_vec())
    };
    assert_eq!(logits("alone.logits").0, 260);
    assert!(logits("alone.logits") == logits("again.logits"));
}
