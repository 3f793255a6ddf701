use super::*;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};
use std::path::Path;

/// Texts that words, numbers, signs, spaces and characters of every length are in.
const TEXTS: [&str; 6] = [
    "The quick brown fox doesn't jump over 12345 lazy dogs.\n",
    "fn main() {\n    println!(\"{}\", x << 3);\n}\n\n\n    // caf\u{e9}\r\n",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c} \u{1f980}\u{1f980} \u{e9}\u{301} \u{a0}\u{2003}x",
    "  leading and trailing  \t ",
    "\u{0}\u{7f}\u{85}\u{ad}\u{feff}",
    "the the the quick quick brown",
];

fn trained(vocab: usize) -> Trained {
    train_bpe(TEXTS.iter().chain(&TEXTS).map(Ok), vocab, &["<|im_end|>".into(), "<image>".into()], |_| ()).unwrap()
}

/// A folder with a small vocabulary.
pub(in crate::data) fn folder(vocab: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    trained(vocab).save(folder.path()).unwrap();
    folder
}

fn open(path: &Path) -> Result<Tokenizer> {
    Tokenizer::open(&TokenizerSpec::Path(path.into()), &SpecialTokens::new())
}

fn small() -> Tokenizer {
    open(folder(300).path()).unwrap()
}

/// What a `tokenizer.json` becomes by changing its JSON.
fn changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer> {
    let mut json: Value = serde_json::from_str(&trained(300).json).unwrap();
    change(&mut json);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    open(folder.path()).map_err(|failure| {
        let here = folder.path().display().to_string();
        Failure { sentence: failure.sentence.replace(&here, "HERE"), ..failure }
    })
}

#[test]
fn bytes_are_tokens() {
    let tokenizer = Tokenizer::bytes();
    assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_document().unwrap()), (257, 256));
    assert_eq!(tokenizer.encode("a\u{e9}").unwrap(), [97, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&[97, 0xc3, 0xa9, 256, 0xff]).unwrap(), "a\u{e9}\u{fffd}");
    assert_eq!([65, 256, 300].map(|id| tokenizer.token_bytes(id)), [1, 0, 0]);
    assert!(tokenizer.special(PAD).is_none() && tokenizer.json().is_none());
    assert_eq!(Tokenizer::restore(&tokenizer.state(), None).unwrap(), tokenizer);
    assert_eq!(Tokenizer::restore(&small().state(), None).unwrap_err().exit_status(), 4);
}

#[test]
fn texts_come_back_and_lengths_add_up() {
    let tokenizer = small();
    assert!(tokenizer.counts_bytes() && tokenizer.vocab_size() > 270, "{tokenizer:?}");
    for text in TEXTS {
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.len() <= text.len());
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(ids.iter().map(|&id| tokenizer.token_bytes(id)).sum::<usize>(), text.len());
        let (again, lengths) = tokenizer.encode_lengths(text).unwrap();
        assert_eq!((again, lengths.iter().sum::<u32>() as usize), (ids.clone(), text.len()));
        let places = tokenizer.encode_places(text).unwrap();
        assert_eq!(places.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
        assert!(places.iter().all(|(_, place)| text.get(place.clone()).is_some()));
        let mut stream = tokenizer.stream();
        let shown: String = ids.iter().map(|&id| stream.push(id)).collect();
        assert_eq!(shown + &stream.end(), text);
    }
    assert_eq!(tokenizer.encode_batch(&TEXTS).unwrap(), TEXTS.map(|text| tokenizer.encode(text).unwrap()));
    assert_eq!(tokenizer.encode("").unwrap(), [0u32; 0]);
}

#[test]
fn special_tokens_have_names() {
    let folder = folder(300);
    let path = TokenizerSpec::Path(folder.path().into());
    let wanted = |name: &str, content: &str| SpecialTokens::from([(name.to_string(), content.to_string())]);
    let tokenizer = Tokenizer::open(&path, &SpecialTokens::new()).unwrap();
    assert_eq!(tokenizer.special(END), Some(0));
    assert_eq!(tokenizer.encode("a<|endoftext|>").unwrap()[1..], [0]);
    assert_eq!((tokenizer.token_bytes(0), tokenizer.content(0).as_deref()), (0, Some("<|endoftext|>")));
    assert!(tokenizer.special(IMAGE).is_none());
    let failure = tokenizer.require(IMAGE).unwrap_err();
    assert_eq!(failure.exit_status(), 2);
    assert!(failure.sentence.contains("no special token image; it has end_of_document"), "{}", failure.sentence);
    let tokenizer = Tokenizer::open(&path, &wanted(IMAGE, "<image>")).unwrap();
    assert_eq!(tokenizer.special(IMAGE), tokenizer.id("<image>"));
    let tokenizer = Tokenizer::open(&path, &wanted(END, "<|im_end|>")).unwrap();
    assert_eq!(tokenizer.end_of_document().unwrap(), tokenizer.id("<|im_end|>").unwrap());
    let failure = Tokenizer::open(&path, &wanted("user", "<|im_ent|>")).unwrap_err();
    assert_eq!(failure.exit_status(), 2);
    assert!(failure.sentence.starts_with("data.special_tokens.user is \"<|im_ent|>\""), "{}", failure.sentence);
    assert!(failure.sentence.contains("; near are \"<|im_end|>\""), "{}", failure.sentence);
    let failure = Tokenizer::open(&TokenizerSpec::Bytes, &wanted(IMAGE, "x")).unwrap_err();
    assert_eq!(failure.exit_status(), 2);
}

#[test]
fn a_pair_of_files_is_the_same_vocabulary() {
    let whole = folder(300);
    let json: Value =
        serde_json::from_str(&std::fs::read_to_string(whole.path().join("tokenizer.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [vocab, merges] = ["vocab.json", "merges.txt"].map(|name| folder.path().join(name));
    let pairs = json["model"]["merges"].as_array().unwrap().iter();
    let lines = pairs.map(|pair| format!("{} {}\n", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
    std::fs::write(&vocab, json["model"]["vocab"].to_string()).unwrap();
    std::fs::write(&merges, format!("#version: 0.2\n{}", lines.collect::<String>())).unwrap();
    let whole = open(whole.path()).unwrap();
    let spec = TokenizerSpec::Pair { vocab: vocab.clone(), merges: merges.clone() };
    for pair in [open(folder.path()).unwrap(), Tokenizer::open(&spec, &SpecialTokens::new()).unwrap()] {
        for text in TEXTS.into_iter().chain(["x<|endoftext|>y"]) {
            assert_eq!(pair.encode(text).unwrap(), whole.encode(text).unwrap());
        }
        assert_eq!(pair.special(END), Some(0));
        assert_ne!(pair.sha256(), whole.sha256());
        // What a checkpoint keeps of it gives the same tokens.
        let kept = Tokenizer::restore(&pair.state(), pair.json().map(str::to_string));
        assert_eq!(kept.as_ref().unwrap(), &pair);
        assert_eq!(kept.unwrap().encode(TEXTS[0]).unwrap(), whole.encode(TEXTS[0]).unwrap());
    }
    let refused = |text: &str| {
        std::fs::write(&merges, text).unwrap();
        open(folder.path()).unwrap_err().sentence
    };
    assert!(refused("#version: 0.2\nq \u{17f}\n").contains("merges.txt line 2: `\u{17f}` is not in vocab.json"));
    assert!(refused("a\n").contains("merges.txt line 1: expected two tokens"));
    assert!(refused("a b c\n").contains("merges.txt line 1: expected two tokens"));
}

#[test]
fn training_is_the_same_every_time() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(|| trained(320));
    let many = rayon::ThreadPoolBuilder::new().num_threads(7).build().unwrap().install(|| trained(320));
    assert_eq!(one.json, many.json);
    assert!(one.tokens > 290 && one.tokens <= 320);
    assert_eq!(trained(259).tokens, 259);
    let failure = train_bpe(TEXTS.iter().map(Ok), 258, &["<|im_end|>".into(), "<image>".into()], |_| ()).unwrap_err();
    assert_eq!(failure.exit_status(), 2);
    assert!(failure.sentence.contains("258") && failure.sentence.contains("259"), "{}", failure.sentence);
    assert_eq!(train_bpe(std::iter::empty::<Result<&str>>(), 300, &[], |_| ()).unwrap_err().exit_status(), 4);
    let broken = [Ok("a"), Err(Failure::data("line 2"))];
    assert_eq!(train_bpe(broken.into_iter(), 300, &[], |_| ()).unwrap_err().sentence, "line 2");
}

#[test]
fn long_texts_are_cut_without_a_trace() {
    let tokenizer = small();
    let Kind::Model(model) = &tokenizer.0.kind else { panic!("a model") };
    assert!(model.cuts);
    let line = |i: usize| format!("{}{}\n{}", TEXTS[i % 6], "x".repeat(i % 5), "\n".repeat(i % 3));
    let text: String = (0..30_000).map(line).collect();
    assert!(long::parts(&text, true).count() > 1);
    let whole = model.tokenizer.encode_fast(text.as_str(), false).unwrap();
    assert_eq!(tokenizer.encode(&text).unwrap(), whole.get_ids());
    let places = tokenizer.encode_places(&text).unwrap();
    assert_eq!(places.iter().map(|(id, _)| *id).collect::<Vec<_>>(), whole.get_ids());
    assert_eq!(places.last().unwrap().1.end, text.len());
    let failure = tokenizer.encode(&" ".repeat(500_000)).unwrap_err();
    assert!(failure.sentence.contains("500000 spaces in a row"), "{}", failure.sentence);
}

#[test]
fn vocabularies_that_are_no_bytes_count_the_text_they_cover() {
    let vocab = json!({"<unk>": 0, "\u{2581}the": 1, "\u{2581}": 2, "t": 3, "h": 4, "e": 5, "<0x0A>": 9});
    let tokenizer = changed(|json| {
        json["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first"});
        json["decoder"] = json["pre_tokenizer"].clone();
        json["added_tokens"] = json!([{"id": 0, "content": "<unk>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}]);
        json["model"] = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"});
    })
    .unwrap();
    assert_eq!((tokenizer.counts_bytes(), tokenizer.vocab_size()), (false, 10));
    // "the" stands for 3 bytes here, " the" for 4, what is unknown for its bytes.
    let (ids, lengths) = tokenizer.encode_lengths("the the \u{e9}\u{e9}").unwrap();
    assert_eq!((ids, lengths), (vec![1, 1, 0], vec![3, 4, 5]));
    assert_eq!(tokenizer.decode(&[1, 1]).unwrap(), "the the");
    let mut stream = tokenizer.stream();
    assert_eq!([1, 1, 7, 1].map(|id| stream.push(id)), ["the", " the", "", " the"]);
    assert_eq!([0, 1, 2, 9, 8].map(|id| tokenizer.token_bytes(id)), [0, 4, 1, 1, 0]);
}

#[test]
fn a_vocabulary_without_all_bytes_says_what_it_lacks() {
    let tokenizer = changed(|json| {
        json["model"]["vocab"].as_object_mut().unwrap().remove("Q");
    })
    .unwrap();
    assert!(tokenizer.encode("q").is_ok());
    let failure = tokenizer.encode("Quick").unwrap_err();
    assert!(failure.sentence.ends_with("has no token for the byte 0x51"), "{}", failure.sentence);
}

#[rstest]
#[case::empty("", "no tokenizer.json: EOF while parsing")]
#[case::no_json("{", "no tokenizer.json: EOF while parsing")]
#[case::other_json("[1, 2]", "invalid type: sequence")]
#[case::nothing_in_it("{}", "missing")]
#[case::kind("{\"model\": {\"type\": \"Nothing\", \"vocab\": {}}}", "")]
#[case::negative_id("{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": -1}, \"merges\": []}}", "")]
#[case::huge_id(
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 4294967295}, \"merges\": []}}",
    "token \"a\" has the id 4294967295"
)]
#[case::no_tokens("{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": []}}", "the vocabulary is empty")]
#[case::unknown_merge("{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [[\"a\", \"b\"]]}}", "b")]
#[case::random(
    "{\"model\": {\"type\": \"BPE\", \"dropout\": 0.5, \"vocab\": {\"a\": 0}, \"merges\": []}}",
    "model.dropout would make tokens random"
)]
fn what_is_no_tokenizer_is_refused(#[case] text: &str, #[case] why: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, text).unwrap();
    let failure = open(&path).unwrap_err();
    assert_eq!(failure.exit_status(), 4);
    assert!(failure.sentence.starts_with(&format!("tokenizer {}: ", path.display())), "{}", failure.sentence);
    assert!(failure.sentence.contains(why) && !failure.sentence.contains('\n'), "{}", failure.sentence);
    assert!(failure.remedy.is_some());
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let failure = open(folder.path()).unwrap_err();
    assert!(failure.sentence.contains("has neither tokenizer.json nor vocab.json"), "{}", failure.sentence);
    let failure = open(&folder.path().join("nowhere")).unwrap_err();
    assert!(failure.sentence.starts_with("cannot read tokenizer ") && failure.exit_status() == 4);
    std::fs::write(folder.path().join("tokenizer.json"), [b'{', 0xff]).unwrap();
    assert!(open(folder.path()).unwrap_err().sentence.ends_with("no UTF-8 at byte 1"));
}

#[test]
fn the_hash_is_of_what_decides_the_tokens() {
    let (one, same, other) = (folder(300), folder(300), folder(310));
    let hash = |folder: &tempfile::TempDir| open(folder.path()).unwrap().sha256().to_string();
    assert_eq!(hash(&one), hash(&same));
    assert_ne!(hash(&one), hash(&other));
    std::fs::write(same.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let tokenizer = open(same.path()).unwrap();
    assert_eq!((tokenizer.sha256(), tokenizer.chat_template()), (hash(&one).as_str(), Some("{{ messages }}")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_text_comes_back(text in any::<String>()) {
        static SMALL: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(small);
        prop_assert_eq!(SMALL.decode(&SMALL.encode(&text).unwrap()).unwrap(), text);
    }

    #[test]
    fn any_ids_are_decoded_alike_at_once_and_one_by_one(ids in prop::collection::vec(0u32..400, 0..40)) {
        static SMALL: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(small);
        let mut stream = SMALL.stream();
        let shown: String = ids.iter().map(|&id| stream.push(id)).collect();
        prop_assert_eq!(shown + &stream.end(), SMALL.decode(&ids).unwrap());
    }

    #[test]
    fn random_bytes_are_no_tokenizer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), bytes).unwrap();
        prop_assert_eq!(open(folder.path()).unwrap_err().exit_status(), 4);
    }

    /// A good file with one part exchanged: it is a tokenizer or it is refused, and neither panics.
    #[test]
    fn damaged_files_never_panic(key in 0usize..8, junk in 0usize..9, text in any::<String>()) {
        let keys = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens", "truncation", "padding"];
        let junk = [json!(null), json!(7), json!("x"), json!([]), json!({}), json!({"type": "Sequence"}),
            json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            json!({"type": "Strip", "content": "a", "start": 1000, "stop": 1000})][junk].clone();
        match changed(|json| json[keys[key]] = junk) {
            Ok(tokenizer) => { let _ = tokenizer.encode(&text).map(|ids| tokenizer.decode(&ids)); }
            Err(failure) => prop_assert_eq!(failure.exit_status(), 4),
        }
    }

    #[test]
    fn a_text_with_bytes_flipped_in_it_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        static JSON: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| trained(270).json);
        let mut bytes = JSON.clone().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), bytes).unwrap();
        match open(folder.path()) {
            Ok(tokenizer) => { let _ = tokenizer.encode(TEXTS[0]).map(|ids| tokenizer.decode(&ids)); }
            Err(failure) => prop_assert_eq!(failure.exit_status(), 4),
        }
    }
}
