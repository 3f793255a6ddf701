//! Complete or absent, every tensor once, and the sentence for everything that is wrong with a checkpoint.

use super::*;
use crate::failure::{Cause, Failure};
use rstest::rstest;
use std::fs;
use std::path::{Path, PathBuf};

fn tensors() -> Vec<LogicalTensor> {
    let tensor = |name: &str, shape: &[usize], data| LogicalTensor { name: name.into(), shape: shape.to_vec(), data };
    vec![
        tensor("decoder.w", &[2, 3], TensorData::F32(vec![1.0, -2.5, 3.0, f32::MIN_POSITIVE, 0.0, -0.0])),
        tensor("optimizer.exp_avg.decoder.w", &[2, 3], TensorData::F64((0..6).map(|i| f64::from(i) / 7.0).collect())),
        tensor("scalar", &[], TensorData::F32(vec![9.0])),
        tensor("empty", &[0, 4], TensorData::F32(Vec::new())),
    ]
}

fn save(store: &Store, step: u64, keep_last: usize) -> PathBuf {
    let mut writer = store.begin(step).unwrap().with_shard_bytes(30);
    writer.add_all(tensors().into_iter().map(Ok)).unwrap();
    let plugins =
        vec![PluginEntry { name: "p".into(), version: "1.0.0".into(), path: "/p.so".into(), sha256: "ab".into() }];
    let meta =
        Meta { step, consumed_samples: step * 8, plugins, extra: serde_json::json!({"tau": 0.5}), ..Meta::default() };
    store.commit(writer, meta, Keep::newest(keep_last)).unwrap()
}

fn store() -> (tempfile::TempDir, Store) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(&root.path().join("checkpoints")).unwrap();
    (root, store)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_read_is_what_was_written() {
    let (_root, store) = store();
    let folder = save(&store, 100, 2);
    assert_eq!(
        names(&folder),
        ["index.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors"]
    );
    let mut reader = CheckpointReader::open(&folder).unwrap();
    assert_eq!((reader.index().step, reader.index().consumed_samples), (100, 800));
    assert_eq!(reader.index().extra["tau"], 0.5);
    assert_eq!(reader.index().plugins[0].name, "p");
    for tensor in tensors() {
        let read = reader.take(&tensor.name, &tensor.shape).unwrap();
        assert_eq!(read, tensor);
        if let (TensorData::F32(a), TensorData::F32(b)) = (&read.data, &tensor.data) {
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
    reader.finish(|_| false).unwrap();
}

#[test]
fn every_tensor_is_used_once() {
    let (_root, store) = store();
    let folder = save(&store, 1, 2);
    let mut reader = CheckpointReader::open(&folder).unwrap();
    let sentence = |failure: Failure| failure.sentence.split_once(": ").unwrap().1.to_string();
    assert_eq!(sentence(reader.take("nothing", &[1]).unwrap_err()), "tensor nothing is missing");
    assert_eq!(
        sentence(reader.take("decoder.w", &[3, 2]).unwrap_err()),
        "tensor decoder.w has shape [2, 3], the model needs [3, 2]"
    );
    reader.take("decoder.w", &[2, 3]).unwrap();
    assert_eq!(sentence(reader.take("decoder.w", &[2, 3]).unwrap_err()), "tensor decoder.w is used twice");
    reader.take("scalar", &[]).unwrap();
    let unused = "tensor optimizer.exp_avg.decoder.w and 1 more are not used by the model";
    assert_eq!(sentence(reader.finish(|_| false).unwrap_err()), unused);
}

#[test]
fn writer_refuses_what_could_not_be_read() {
    let (_root, store) = store();
    let mut writer = store.begin(1).unwrap();
    let tensor = |len| LogicalTensor { name: "w".into(), shape: vec![2], data: TensorData::F32(vec![0.0; len]) };
    let failure = writer.add(tensor(3)).unwrap_err();
    assert_eq!(failure.sentence, "checkpoint tensor w: shape [2] holds 2 elements, 3 are given");
    writer.add(tensor(2)).unwrap();
    assert_eq!(writer.add(tensor(2)).unwrap_err().sentence, "checkpoint tensor w is given twice");
}

#[test]
fn newest_are_kept_and_latest_names_the_newest() {
    let (root, store) = store();
    let checkpoints = root.path().join("checkpoints");
    assert_eq!(store.latest().unwrap(), None);
    for step in [5, 10, 15, 100_000_000] {
        save(&store, step, 2);
    }
    assert_eq!(names(&checkpoints), ["latest", "step-00000015", "step-100000000"]);
    assert_eq!(fs::read_to_string(checkpoints.join("latest")).unwrap(), "step-100000000\n");
    // A run resumed further back: its own newest stays, later ones are left alone.
    save(&store, 7, 1);
    assert_eq!(names(&checkpoints), ["latest", "step-00000007", "step-00000015", "step-100000000"]);
    assert_eq!(store.latest().unwrap(), Some(checkpoints.join("step-00000007")));
    // Saving a step again replaces it.
    save(&store, 7, 1);
    CheckpointReader::open(&checkpoints.join("step-00000007")).unwrap();
}

#[test]
fn torn_saves_are_cleaned_and_half_replaced_ones_restored() {
    let (root, store) = store();
    let checkpoints = root.path().join("checkpoints");
    save(&store, 5, 2);
    fs::create_dir(checkpoints.join(".new-step-00000010")).unwrap();
    fs::write(checkpoints.join(".new-step-00000010/shard-00000.safetensors"), "half").unwrap();
    fs::write(checkpoints.join(".new-latest"), "step").unwrap();
    fs::rename(checkpoints.join("step-00000005"), checkpoints.join(".old-step-00000005")).unwrap();
    let store = Store::open(&checkpoints).unwrap();
    assert_eq!(names(&checkpoints), ["latest", "step-00000005"]);
    CheckpointReader::open(&store.latest().unwrap().unwrap()).unwrap();
}

#[test]
fn a_folder_that_is_no_checkpoint_is_not_replaced() {
    let (root, store) = store();
    let folder = root.path().join("checkpoints/step-00000003");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    let failure = store.begin(3).map(drop).unwrap_err();
    assert!(failure.sentence.contains("holds no checkpoint (index.json is missing)"), "{}", failure.sentence);
    assert_eq!(fs::read_to_string(folder.join("notes.txt")).unwrap(), "mine");
}

#[test]
fn abandoned_writer_leaves_nothing() {
    let (root, store) = store();
    let mut writer = store.begin(3).unwrap().with_shard_bytes(1);
    writer.add_all(tensors().into_iter().map(Ok)).unwrap();
    drop(writer);
    assert!(names(&root.path().join("checkpoints")).is_empty());
}

/// A planted fault in a complete checkpoint and what must be said about it.
#[rstest]
#[case::truncated(|folder: &Path| {
    let path = folder.join("shard-00001.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
}, "shard-00001.safetensors has ")]
#[case::one_bit(|folder: &Path| {
    let path = folder.join("shard-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
}, "shard-00000.safetensors has a wrong checksum")]
#[case::shard_missing(|folder: &Path| fs::remove_file(folder.join("shard-00000.safetensors")).unwrap(),
    "shard-00000.safetensors cannot be read")]
#[case::index_missing(|folder: &Path| fs::remove_file(folder.join("index.json")).unwrap(), "is damaged: cannot read")]
#[case::index_torn(|folder: &Path| {
    let text = fs::read_to_string(folder.join("index.json")).unwrap();
    fs::write(folder.join("index.json"), &text[..text.len() / 2]).unwrap();
}, "is damaged: ")]
#[case::index_empty(|folder: &Path| fs::write(folder.join("index.json"), "").unwrap(), "is damaged: ")]
#[case::step(|folder: &Path| patch(folder, "\"step\": 1", "\"step\": 2"), "index.json has a wrong checksum")]
#[case::samples(|folder: &Path| patch(folder, "\"consumed_samples\": 8", "\"consumed_samples\": 9"),
    "index.json has a wrong checksum")]
#[case::state(|folder: &Path| patch(folder, "\"tau\": 0.5", "\"tau\": 0.25"), "index.json has a wrong checksum")]
#[case::no_checksum(|folder: &Path| patch(folder, "sha256\": \"", "sha256\": \"0"), "index.json has a wrong checksum")]
#[case::renamed_inside(|folder: &Path| edit(folder, "\"step\": 1", "\"step\": 2"), "is of step 2, not of the step in its name")]
#[case::foreign(|folder: &Path| fs::write(folder.join("index.json"), "{\"weights\": 1}").unwrap(),
    "was not written by Gantry")]
#[case::version(|folder: &Path| edit(folder, "\"version\": 2", "\"version\": 99"), "has format version 99")]
#[case::shape(|folder: &Path| edit(folder, "\"name\": \"scalar\",\n      \"shape\": []", "\"name\": \"scalar\",\n      \"shape\": [1]"),
    "tensor scalar: index.json says F32 [1], shard-00002.safetensors holds F32 []")]
#[case::name(|folder: &Path| edit(folder, "\"name\": \"decoder.w\"", "\"name\": \"decoder.v\""),
    "tensor decoder.v is not in shard-00000.safetensors")]
#[case::outside(|folder: &Path| edit(folder, "shard-00000.safetensors\": {", "../shard-00000.safetensors\": {"),
    "is no plain file name")]
fn faulty_checkpoint_is_refused(#[case] plant: fn(&Path), #[case] part: &str) {
    let (_root, store) = store();
    let folder = save(&store, 1, 2);
    plant(&folder);
    let failure = CheckpointReader::open(&folder).unwrap_err();
    assert!(failure.sentence.contains(part), "{}", failure.sentence);
    assert!(failure.sentence.contains("step-00000001"));
    assert_eq!(failure.cause, Cause::Data);
}

/// Changes the index as damage would.
fn patch(folder: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(folder.join("index.json")).unwrap();
    // From the end: the index's own checksum comes last.
    let at = text.rfind(from).unwrap();
    fs::write(folder.join("index.json"), format!("{}{to}{}", &text[..at], &text[at + from.len()..])).unwrap();
}

/// Changes the index as a program would that writes checkpoints: its checksum is right.
fn edit(folder: &Path, from: &str, to: &str) {
    patch(folder, from, to);
    let text = fs::read_to_string(folder.join("index.json")).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["sha256"] = super::index::digest(&value).into();
    fs::write(folder.join("index.json"), serde_json::to_string_pretty(&value).unwrap()).unwrap();
}

#[test]
fn checksum_of_the_index_counts_numbers_as_they_are_read() {
    let (_root, store) = store();
    let numbers: Vec<f64> = (1..2000).map(|i| 1.0 / f64::from(i)).chain([1e300, 5e-324, 0.1 + 0.2]).collect();
    let meta =
        Meta { step: 3, extra: serde_json::json!({"numbers": numbers, "b": {"z": 1, "a": [null]}}), ..Meta::default() };
    let folder = store.commit(store.begin(3).unwrap(), meta, Keep::newest(1)).unwrap();
    CheckpointReader::open(&folder).unwrap();
}

#[test]
fn damaged_checkpoint_comes_with_the_one_before_it() {
    let (_root, store) = store();
    let (first, second) = (save(&store, 1, 2), save(&store, 2, 2));
    fs::write(second.join("index.json"), "").unwrap();
    let failure = CheckpointReader::open(&second).unwrap_err();
    assert_eq!(failure.remedy.unwrap(), format!("resume from the one before it: --resume {}", first.display()));
    fs::remove_file(first.join("shard-00000.safetensors")).unwrap();
    let failure = CheckpointReader::open(&first).unwrap_err();
    assert_eq!(failure.remedy.unwrap(), "name another checkpoint with --resume PATH, or start over with --resume none");
    let failure = CheckpointReader::open(first.parent().unwrap()).unwrap_err();
    assert_eq!(failure.remedy.unwrap(), "name a folder step-XXXXXXXX under checkpoints/");
}

#[test]
fn latest_that_names_nothing_is_refused() {
    let (root, store) = store();
    fs::write(root.path().join("checkpoints/latest"), "../../etc\n").unwrap();
    let failure = store.latest().unwrap_err();
    assert!(failure.sentence.ends_with("latest names `../../etc`, which is no checkpoint here"));
    assert_eq!(failure.exit_status(), 4);
}

/// Saves a small checkpoint with a held-out loss.
fn save_scored(store: &Store, step: u64, valid_loss: Option<f64>, keep: Keep) {
    let meta = Meta { step, valid_loss, ..Meta::default() };
    store.commit(store.begin(step).unwrap(), meta, keep).unwrap();
}

#[test]
fn the_best_and_steps_for_good_are_kept() {
    let (root, store) = store();
    let checkpoints = root.path().join("checkpoints");
    let keep = Keep { last: 1, every: Some(20), best: true };
    let best = || fs::read_to_string(checkpoints.join("best")).unwrap_or_default();
    save_scored(&store, 5, None, keep);
    assert_eq!((best(), store.best().unwrap()), (String::new(), None));
    for (step, loss, named) in [(10, 3.0, 10), (15, 2.5, 15), (20, 2.75, 15), (25, 2.5, 15), (30, f64::NAN, 15)] {
        save_scored(&store, step, Some(loss), keep);
        assert_eq!(best(), format!("step-{named:08}\n"), "after step {step}");
    }
    assert_eq!(names(&checkpoints), ["best", "latest", "step-00000015", "step-00000020", "step-00000030"]);
    assert_eq!(store.best().unwrap(), Some(checkpoints.join("step-00000015")));
    assert_eq!(CheckpointReader::open(&checkpoints.join("step-00000015")).unwrap().index().valid_loss, Some(2.5));
    // A better one takes its place, and only then may the old one go.
    save_scored(&store, 35, Some(2.0), keep);
    assert_eq!(names(&checkpoints), ["best", "latest", "step-00000020", "step-00000035"]);
    // Kept even by a run that no longer asks for it.
    save_scored(&store, 36, None, Keep::newest(1));
    assert_eq!(names(&checkpoints), ["best", "latest", "step-00000035", "step-00000036"]);
}

#[test]
fn the_best_is_found_again_after_a_kill_and_after_going_back() {
    let (root, store) = store();
    let best = root.path().join("checkpoints/best");
    let keep = Keep { last: 9, every: None, best: true };
    for (step, loss) in [(1, 3.0), (2, 2.0), (3, 1.0)] {
        save_scored(&store, step, Some(loss), keep);
    }
    // Killed after the checkpoint was complete and before `best` named it.
    fs::write(&best, "step-00000002\n").unwrap();
    store.refresh_best(3).unwrap();
    assert_eq!(fs::read_to_string(&best).unwrap(), "step-00000003\n");
    store.refresh_best(1).unwrap();
    assert_eq!(fs::read_to_string(&best).unwrap(), "step-00000001\n");
    // The same step again with another score.
    save_scored(&store, 1, Some(9.0), keep);
    save_scored(&store, 2, Some(8.0), keep);
    assert_eq!(fs::read_to_string(&best).unwrap(), "step-00000002\n");
    store.refresh_best(0).unwrap();
    assert!(!best.exists());
}

#[test]
fn a_path_stands_for_a_checkpoint() {
    let (root, store) = store();
    let checkpoints = root.path().join("checkpoints");
    let keep = Keep { last: 9, every: None, best: true };
    save_scored(&store, 1, Some(1.0), keep);
    save_scored(&store, 2, Some(2.0), keep);
    let two = checkpoints.join("step-00000002");
    for path in [root.path(), &checkpoints, &checkpoints.join("latest"), &two] {
        assert_eq!(locate(path).unwrap(), two, "{}", path.display());
    }
    assert_eq!(locate(&checkpoints.join("best")).unwrap(), checkpoints.join("step-00000001"));
    let other = root.path().join("other");
    assert_eq!(locate(&other).unwrap(), other);
}

#[test]
fn all_that_does_not_fit_is_named_at_once() {
    let (_root, store) = store();
    let reader = CheckpointReader::open(&save(&store, 1, 2)).unwrap();
    let wanted = |names: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
        names.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
    };
    let moments = |name: &str| name.starts_with("optimizer.");
    let fits = wanted(&[("decoder.w", &[2, 3]), ("scalar", &[]), ("empty", &[0, 4])]);
    reader.expect(&fits, None, moments).unwrap();
    reader.expect(&fits, Some(ElementType::F32), moments).unwrap();
    let failure = reader.expect(&fits, Some(ElementType::F64), moments).unwrap_err();
    assert!(failure.sentence.ends_with("tensor decoder.w has type F32, the model needs F64"), "{failure}");
    assert_eq!(failure.details.len(), 2);
    assert!(failure.remedy.unwrap().starts_with("set train.precision as in the run"));
    let other = wanted(&[("decoder.w", &[3, 2]), ("scalar", &[]), ("more", &[7])]);
    let failure = reader.expect(&other, None, |_| false).unwrap_err();
    assert!(failure.sentence.ends_with("tensor decoder.w has shape [2, 3], the model needs [3, 2]"), "{failure}");
    let rest = [
        "tensor more is missing",
        "tensor optimizer.exp_avg.decoder.w is not used by the model",
        "tensor empty is not used by the model",
    ];
    assert_eq!(failure.details, rest);
    let many: Vec<_> = (0..20).map(|i| (format!("w{i}"), vec![1])).collect();
    assert_eq!(reader.expect(&many, None, |_| true).unwrap_err().details.last().unwrap(), "and 11 more");
}
