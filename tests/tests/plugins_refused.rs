//! Files that are no plugin for this host are refused in one sentence, before any of their code runs.

use gantry::failure::Failure;
use gantry::plugin::inspect::inspect;
use gantry::plugin::{PluginFile, PluginSet, Search};
use gantry_plugin_api::abi::hello::MAGIC;
use gantry_tests::plugins::{file_name, fixture};
use rstest::rstest;
use serde_json::json;
use std::path::{Path, PathBuf};

fn allowed(path: &Path) -> PluginFile {
    PluginFile { allow_writable: true, ..PluginFile::new(path) }
}

/// What the host says to a file.
fn refusal(path: &Path) -> String {
    let failure = Failure::from(PluginSet::default().add_file(&allowed(path)).unwrap_err());
    assert_eq!(failure.exit_status(), 3);
    assert_eq!(failure.sentence.lines().count(), 1, "{}", failure.sentence);
    assert!(failure.sentence.contains(path.file_name().unwrap().to_str().unwrap()), "{}", failure.sentence);
    failure.sentence
}

/// A copy of the well-behaved plugin with some bytes of its hello overwritten, `offset` after the magic.
fn patched(folder: &Path, offset: usize, bytes: &[u8]) -> PathBuf {
    let mut library = std::fs::read(fixture("elastic-test")).unwrap();
    let found: Vec<usize> =
        library.windows(MAGIC.len()).enumerate().filter(|(_, w)| *w == MAGIC).map(|(i, _)| i).collect();
    for at in found {
        // The magic may also stand by itself; the hello is where a plausible size follows.
        let size = u32::from_le_bytes(library[at + 16..at + 20].try_into().unwrap());
        if (64..1024).contains(&size) {
            library[at + 16 + offset..at + 16 + offset + bytes.len()].copy_from_slice(bytes);
        }
    }
    let path = folder.join(file_name("patched"));
    std::fs::write(&path, library).unwrap();
    path
}

// Offsets after the magic: size 0, major 4, minor 8, panic strategy 12, layout hash 16.
#[rstest]
#[case(4, &[2, 0, 0, 0], "was built for plugin API 2.0, this host speaks 1.")]
#[case(12, &[1, 0, 0, 0], "was built with panic = \"abort\"")]
#[case(0, &[70, 0, 0, 0], "is a library but not a Gantry plugin")]
fn a_hello_that_does_not_fit_is_refused(#[case] offset: usize, #[case] bytes: &[u8], #[case] sentence: &str) {
    let folder = tempfile::tempdir().unwrap();
    let said = refusal(&patched(folder.path(), offset, bytes));
    assert!(said.contains(sentence), "{said}");
}

#[test]
fn an_unknown_layout_hash_alone_is_checked_and_loads() {
    let folder = tempfile::tempdir().unwrap();
    let path = patched(folder.path(), 16, &[7; 8]);
    let mut set = PluginSet::default();
    set.add_file(&allowed(&path)).unwrap();
    set.provider("tiny", &json!({"layers": 1})).unwrap().plan().unwrap();
}

#[test]
fn a_wrong_layout_is_told_by_its_first_difference() {
    let said = refusal(&fixture("wrong-layout"));
    assert!(said.contains("plugin wrong-layout disagrees with this host about the layout of the boundary: "), "{said}");
    assert!(said.contains("rebuild it against gantry-plugin-api") && said.len() < 700, "{said}");
}

#[test]
fn a_library_without_hello_is_no_plugin() {
    let said = refusal(&fixture("not-a-plugin"));
    assert!(said.contains("is a library but not a Gantry plugin (it has no gantry_hello)"), "{said}");
}

#[rstest]
#[case(b"not a library at all".as_slice())]
#[case(b"".as_slice())]
fn other_files_cannot_be_opened(#[case] content: &[u8]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file_name("text"));
    std::fs::write(&path, content).unwrap();
    let said = refusal(&path);
    assert!(said.contains("cannot be opened as a library: "), "{said}");
}

#[test]
fn a_truncated_plugin_cannot_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file_name("torn"));
    let library = std::fs::read(fixture("elastic-test")).unwrap();
    for len in [2000, library.len() / 2, library.len() - 1] {
        std::fs::write(&path, &library[..len]).unwrap();
        let said = refusal(&path);
        assert!(said.contains(&format!("the file is cut short: {len} of ")), "{said}");
    }
}

#[test]
fn a_missing_plugin_lists_where_it_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let search = Search { folders: vec![folder.path().into()], ..Search::default() };
    let failure = Failure::from(PluginSet::load(search, ["no-such"]).map(drop).unwrap_err());
    assert!(failure.sentence.starts_with("no plugin for \"no-such\": libno_such"), "{failure}");
    assert_eq!(failure.details, [folder.path().join(file_name("no-such")).display().to_string()]);
    assert_eq!(failure.exit_status(), 3);
}

#[test]
fn two_plugins_with_one_provider_are_ambiguous() {
    let folder = tempfile::tempdir().unwrap();
    let mut set = PluginSet::default();
    set.add_file(&allowed(&fixture("elastic-test"))).unwrap();
    let e = set.add_file(&allowed(&patched(folder.path(), 16, &[7; 8]))).unwrap_err().to_string();
    assert!(e.starts_with("\"tiny\" is offered by both plugin elastic-test"), "{e}");
}

#[test]
fn an_inspection_says_what_is_inside() {
    let inspection = inspect(&allowed(&fixture("elastic-test")), &Search::default()).unwrap();
    assert_eq!((inspection.name.as_str(), inspection.providers.len()), ("elastic-test", 4));
    assert!(inspection.rustc.starts_with("rustc ") && inspection.operators.contains(&"ssd_scan".to_owned()));
    let schema = &inspection.providers[0].config_schema;
    assert!(schema["properties"]["layers"].is_object(), "{schema}");
}
