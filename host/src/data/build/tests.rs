use super::*;
use crate::data::Tokenizer;
use crate::data::megatron::IndexedDataset;
use rstest::rstest;
use std::io::Write;
use std::path::Path;

fn task(content: Content, end: Option<u32>) -> Task {
    Task { content, keys: vec!["text".into()], end }
}

fn run(root: &Path, inputs: &[&str], task: &Task, workers: usize) -> Result<Option<Status>> {
    let paths: Vec<_> = inputs.iter().map(|name| root.join(name)).collect();
    let inputs = Inputs::find(&paths, &[], false)?;
    let output = Output { dtype: Dtype::U16, prefixes: vec![root.join("out/set")] };
    std::fs::create_dir_all(root.join("out")).unwrap();
    build(&inputs, task, &output, workers, &AtomicBool::new(false), &mut |_| {})
}

fn sequences(root: &Path) -> Vec<Vec<Vec<i64>>> {
    let set = IndexedDataset::open(root.join("out/set")).unwrap();
    (0..set.index().documents())
        .map(|document| set.index().document(document).map(|sequence| set.sequence(sequence).unwrap()).collect())
        .collect()
}

#[test]
fn texts_lines_and_packed_files_become_documents_in_order() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    std::fs::create_dir(path("in")).unwrap();
    std::fs::write(path("in/a.txt"), "ab").unwrap();
    std::fs::write(path("in/b.txt"), "").unwrap();
    std::fs::write(path("in/c.bin"), [0u8, 1]).unwrap();
    std::fs::write(
        path("lines.jsonl"),
        "{\"text\": \"c\"}\n\n{\"text\": \"\", \"x\": 1}\r\n{\"text\": [\"d\", \"\", \"e\"]}",
    )
    .unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(b"{\"text\": \"f\"}\n").unwrap();
    // A second member, as appending to a packed file gives.
    let mut bytes = packed.finish().unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(b"{\"text\": \"g\"}\n").unwrap();
    bytes.extend(packed.finish().unwrap());
    std::fs::write(path("lines.jsonl.gz"), bytes).unwrap();
    let zst = |text: &[u8]| ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Uncompressed);
    std::fs::write(path("h.txt.zst"), [zst(b"h"), zst(b"i")].concat()).unwrap();
    let bytes = task(Content::Text(Tokenizer::bytes()), Some(256));
    let inputs = ["in", "lines.jsonl", "lines.jsonl.gz", "h.txt.zst"];
    let status = run(root.path(), &inputs, &bytes, 2).unwrap().unwrap();
    let expect: Vec<Vec<Vec<i64>>> = vec![
        vec![vec![97, 98, 256]],
        vec![vec![99, 256]],
        vec![],
        vec![vec![100], vec![101, 256]],
        vec![vec![102, 256]],
        vec![vec![103, 256]],
        vec![vec![104, 105, 256]],
    ];
    assert_eq!(sequences(root.path()), expect);
    assert_eq!((status.documents, status.tokens, status.empty, status.binary), (7, 15, 1, 1));
    assert_eq!(status.read, status.total);
}

/// Parts are finished in any order; what is written is the same, whatever the number of threads.
#[test]
fn the_number_of_threads_changes_no_byte() {
    let root = tempfile::tempdir().unwrap();
    let mut lines = String::new();
    for i in 0..60_000u64 {
        let text = "word ".repeat((i * 2_654_435_761 % 23) as usize);
        lines += &format!("{{\"text\": \"{text}{i}\"}}\n");
    }
    std::fs::write(root.path().join("a.jsonl"), &lines).unwrap();
    assert!(lines.len() > 4 << 20);
    let bytes = task(Content::Text(Tokenizer::bytes()), Some(256));
    let mut all = Vec::new();
    for workers in [1, 2, 5] {
        run(root.path(), &["a.jsonl"], &bytes, workers).unwrap().unwrap();
        let read = |ending: &str| std::fs::read(root.path().join(format!("out/set.{ending}"))).unwrap();
        all.push((read("bin"), read("idx")));
    }
    assert!(all[0] == all[1] && all[0] == all[2]);
    assert_eq!(sequences(root.path()).len(), 60_000);
}

#[rstest]
#[case("{\"text\": 5}", "`text` is a number, expected a text or a list of texts")]
#[case("{\"text\": [\"a\", null]}", "in a list, `text` is null, expected a text or a list of texts")]
#[case("{\"txt\": \"a\"}", "there is no key `text`")]
#[case("[\"a\"]", "a list where an object is expected")]
#[case("{\"text\": \"a", "no JSON from column 11 on: EOF while parsing a string")]
#[case("{\"text\": \"\\ud800\"}", "no JSON from column 17 on: unexpected end of hex escape")]
fn a_broken_line_is_named(#[case] line: &str, #[case] what: &str) {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.jsonl"), format!("{{\"text\": \"a\"}}\n\n{line}\n")).unwrap();
    let failure = run(root.path(), &["a.jsonl"], &task(Content::Text(Tokenizer::bytes()), None), 2).unwrap_err();
    assert_eq!(failure.sentence, format!("{}:3: {what}", root.path().join("a.jsonl").display()));
    assert_eq!(failure.exit_status(), 4);
    // Nothing is left, not even what was begun.
    assert_eq!(std::fs::read_dir(root.path().join("out")).unwrap().count(), 0);
}

#[rstest]
#[case("[1, -2]", "-2 is no token id")]
#[case("[1, 2.5]", "2.5 is no token id")]
#[case("[[1], 2]", "a number among lists of token ids")]
#[case("{\"text\": \"a\"}", "`text` is a text, expected a list of token ids")]
#[case("[1, 70000]", "token 70000 does not fit uint16 (0 to 65535)")]
#[case("[4294967296]", "4294967296 is no token id")]
fn a_line_without_ids_is_named(#[case] line: &str, #[case] what: &str) {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.jsonl"), line).unwrap();
    let failure = run(root.path(), &["a.jsonl"], &task(Content::Ids, None), 1).unwrap_err();
    assert_eq!(failure.sentence, format!("{}:1: {what}", root.path().join("a.jsonl").display()));
}

#[test]
fn ids_are_taken_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.jsonl"), "[5, 6]\n{\"text\": [[7], [8, 9]]}\n[]\n").unwrap();
    run(root.path(), &["a.jsonl"], &task(Content::Ids, None), 2).unwrap().unwrap();
    let expect: Vec<Vec<Vec<i64>>> = vec![vec![vec![5, 6]], vec![vec![7], vec![8, 9]], vec![]];
    assert_eq!(sequences(root.path()), expect);
}

#[test]
fn a_file_that_is_no_text_or_cut_off_is_named() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.txt"), b"ab\xff").unwrap();
    let bytes = task(Content::Text(Tokenizer::bytes()), None);
    let sentence = |inputs: &[&str]| run(root.path(), inputs, &bytes, 2).unwrap_err().sentence;
    assert!(sentence(&["a.txt"]).ends_with("a.txt: not UTF-8 from byte 2 on"));
    std::fs::write(root.path().join("b.txt.gz"), b"\x1f\x8b\x08\x00").unwrap();
    assert!(sentence(&["b.txt.gz"]).contains("cannot read "));
    std::fs::write(root.path().join("c.txt.zst"), b"\x28\xb5\x2f\xfd\x00").unwrap();
    assert!(sentence(&["c.txt.zst"]).contains("c.txt.zst: Zstandard: "));
    assert!(sentence(&["none"]).starts_with("cannot read INPUT "));
    std::fs::create_dir(root.path().join("folder")).unwrap();
    assert!(sentence(&["folder"]).starts_with("no files in "));
    std::fs::write(root.path().join("folder/x"), [0u8]).unwrap();
    assert_eq!(sentence(&["folder"]), "the inputs hold no document (0 files are empty, 1 are no text)");
}

#[test]
fn stopping_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.txt"), "text").unwrap();
    let inputs = Inputs::find(&[root.path().join("a.txt")], &[], false).unwrap();
    std::fs::create_dir(root.path().join("out")).unwrap();
    let output = Output { dtype: Dtype::U16, prefixes: vec![root.path().join("out/set")] };
    let bytes = task(Content::Text(Tokenizer::bytes()), None);
    let done = build(&inputs, &bytes, &output, 2, &AtomicBool::new(true), &mut |_| {}).unwrap();
    assert_eq!((done, std::fs::read_dir(root.path().join("out")).unwrap().count()), (None, 0));
}

#[test]
fn texts_for_a_vocabulary() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a.txt"), "one").unwrap();
    std::fs::write(root.path().join("b.jsonl"), "{\"text\": \"two\"}\n{\"text\": [\"three\", \"four\"]}\n{}\n")
        .unwrap();
    let inputs = Inputs::find(&[root.path().join("a.txt"), root.path().join("b.jsonl")], &[], false).unwrap();
    let all: Vec<_> = texts(&inputs, "text").collect();
    let good: Vec<_> = all.iter().flatten().collect();
    assert_eq!(good, ["one", "two", "three", "four"]);
    let failure = all.into_iter().find_map(Result::err).unwrap();
    assert!(failure.sentence.ends_with("b.jsonl:3: there is no key `text`"), "{failure}");
}
