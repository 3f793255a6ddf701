use super::*;
use crate::data::tokenizer::SpecialTokens;
use crate::recipe::TokenizerSpec;
use proptest::prelude::*;
use rstest::rstest;

/// Marks nothing: turns are found by rendering.
const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
const LINE: &str = r#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}"#;

fn chat(template: Option<&str>, train_on: TrainOn) -> Chat {
    let template = template.map(|source| match source {
        "chatml" => Template::open(source).unwrap(),
        source => Template::new("test", source).unwrap(),
    });
    Chat::new(template, train_on, Tokenizer::bytes())
}

/// A line's text with what is learned in brackets.
fn shown(chat: &Chat, line: &str) -> Result<String, String> {
    let Rendered { text, learned, learns_end } = chat.render(&Line::parse(line)?)?;
    let mut out = text.clone();
    for stretch in learned.iter().rev() {
        out.insert(stretch.end, ']');
        out.insert(stretch.start, '[');
    }
    Ok(out + if learns_end { "!" } else { "" })
}

#[rstest]
#[case(TrainOn::Assistant, "<user>2+2?</>\n<assistant>[4</>\n]<user>sure?</>\n<assistant>[yes</>\n]!")]
#[case(TrainOn::Completion, "<user>2+2?</>\n<assistant>4</>\n<user>sure?</>\n<assistant>[yes</>\n]!")]
#[case(TrainOn::All, "[<user>2+2?</>\n<assistant>4</>\n<user>sure?</>\n<assistant>yes</>\n]!")]
fn turns_are_found_by_rendering(#[case] train_on: TrainOn, #[case] expected: &str) {
    assert_eq!(shown(&chat(Some(PLAIN), train_on), LINE).unwrap(), expected);
}

#[rstest]
#[case(TrainOn::Assistant, "[4<|im_end|>]", "[yes<|im_end|>]")]
#[case(TrainOn::Completion, "4<|im_end|>", "[yes<|im_end|>]")]
fn marks_of_the_template_are_taken(#[case] train_on: TrainOn, #[case] first: &str, #[case] second: &str) {
    let expected = format!(
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{first}\n<|im_start|>user\nsure?<|im_end|>\n\
         <|im_start|>assistant\n{second}\n"
    );
    assert_eq!(shown(&chat(Some("chatml"), train_on), LINE).unwrap(), expected);
}

#[test]
fn blanks_around_generation_tags_are_those_of_other_tags() {
    let with = |begin: &str, end: &str| {
        let source = format!(
            "{{% for m in messages %}}\n  {{% if m.role == 'assistant' %}}\n  {begin}\n  {{{{ m.content }}}}\n  {end}\n\
             {{% endif %}}\n{{% endfor %}}"
        );
        let template = Template::new("test", &source).unwrap();
        let messages = [Message::new("user", "a"), Message::new("assistant", "b")];
        template.render(&messages, &[], false, &Tokenizer::bytes()).unwrap()
    };
    let blocks = with("{% generation %}", "{% endgeneration %}");
    assert_eq!((blocks.0.as_str(), blocks.1.len(), &blocks.1[0]), ("  b\n", 1, &(0..4)));
    assert_eq!(with("{% set x = 1 %}", "{% set x = 1 %}").0, blocks.0);
    let tight = with("{%- generation -%}", "{%- endgeneration -%}");
    assert_eq!((tight.0.as_str(), tight.1.len(), &tight.1[0]), ("b", 1, &(0..1)));
    assert_eq!(with("{%- set x = 1 -%}", "{%- set x = 1 -%}").0, tight.0);
}

#[rstest]
#[case::prompt_and_completion(r#"{"prompt": "Q: 1?\n", "completion": "A: 2"}"#, "Q: 1?\n[A: 2]!")]
#[case::text(r#"{"text": "just text"}"#, "[just text]!")]
#[case::sharegpt(
    r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
    "<user>a</>\n<assistant>[b</>\n]!"
)]
#[case::conversational_prompt(
    r#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        "completion": [{"role": "assistant", "content": "d"}]}"#,
    "<user>a</>\n<assistant>b</>\n<user>c</>\n<assistant>[d</>\n]!"
)]
#[case::assistant_first(
    r#"{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}"#,
    "<assistant>[a</>\n]<user>b</>\n"
)]
fn every_spelling(#[case] line: &str, #[case] expected: &str) {
    assert_eq!(shown(&chat(Some(PLAIN), TrainOn::Assistant), line).unwrap(), expected);
}

#[rstest]
#[case("{", "no JSON: EOF while parsing an object (column 1)")]
#[case("[1]", "it is a list, expected an object with messages")]
#[case(r#"{"a": 1, "b": 2}"#, "expected messages, conversations, prompt with completion, or text; its keys are a, b")]
#[case(r#"{"messages": "x"}"#, "`messages` is text, expected a list")]
#[case(r#"{"messages": []}"#, "`messages` is empty")]
#[case(r#"{"messages": [3]}"#, "`messages` message 1 is a number, expected an object")]
#[case(
    r#"{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}"#,
    "`messages` message 2: `role` is missing, expected text"
)]
#[case(r#"{"messages": [{"role": "user"}]}"#, "`messages` message 1: `content` is missing, expected text")]
#[case(r#"{"prompt": "a"}"#, "`prompt` is text and `completion` missing; expected two texts or two lists of messages")]
#[case(r#"{"messages": [{"role": "narrator", "content": "a"}]}"#, "the template: line 1: no narrator here")]
#[case(
    "{\"text\": \"\u{fdd0}\", \"messages\": [{\"role\": \"user\", \"content\": \"\u{fdd0}\"}]}",
    "the marks of {% generation %} are not in pairs"
)]
fn broken_lines_say_what_is_wrong(#[case] line: &str, #[case] why: &str) {
    let strict = "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrator here') }}{% endif %}\
                  {{ m.content }}{% endfor %}";
    let said = shown(&chat(Some(strict), TrainOn::Assistant), line).unwrap_err();
    assert!(said.starts_with(why), "{said}");
}

#[test]
fn template_that_writes_earlier_turns_otherwise_is_refused() {
    // The last turn is written in capitals, as templates do that leave out what was thought before.
    let last = "{% for m in messages %}{{ m.content|upper if loop.last else m.content }};{% endfor %}";
    let said = shown(&chat(Some(last), TrainOn::Assistant), LINE).unwrap_err();
    assert!(said.starts_with("the template writes the text up to message 4 otherwise when more follows"), "{said}");
    assert!(shown(&chat(Some(last), TrainOn::All), LINE).is_ok());
    let said = shown(&chat(None, TrainOn::Assistant), LINE).unwrap_err();
    assert!(said.starts_with("messages need a template"), "{said}");
}

#[test]
fn templates_have_what_theirs_have() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}\
                  {% if not loop.first %}{% break %}{% endif %}{{ m['content'].strip().split(' ')[0] | trim }}{% endfor %}\
                  {{ ns.n }}{{ tools | tojson }}{{ tools[0] | tojson(indent=1) }}{{ bos_token is defined }}\
                  {{ messages[0].get('x', 'none') }}{{ enable is true }}";
    let line = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": " b c "}, {"role": "user", "content": ""}],
        "tools": [{"z": "<é>", "a": [1, 2.5, null]}], "chat_template_kwargs": {"enable": true}}"#;
    let rendered = chat(Some(source), TrainOn::All).render(&Line::parse(line).unwrap()).unwrap();
    let json = "[{\"z\": \"<\u{e9}>\", \"a\": [1, 2.5, null]}]";
    let indented = "{\n \"z\": \"<\u{e9}>\",\n \"a\": [\n  1,\n  2.5,\n  null\n ]\n}";
    assert_eq!(rendered.text, format!("b2{json}{indented}FalsenoneTrue"));
    let failure = Template::new("broken", "{% for %}").unwrap_err();
    assert!(failure.sentence.starts_with("chat template broken: line 1: ") && failure.exit_status() == 4, "{failure}");
    let endless =
        chat(Some("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"), TrainOn::All);
    assert!(endless.render(&Line::parse(LINE).unwrap()).is_err());
}

#[test]
fn questions_end_where_answers_begin() {
    let template = Template::open("chatml").unwrap();
    let text = template.ask("why?", &Tokenizer::bytes()).unwrap();
    assert_eq!(text, "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(template.closing(&Tokenizer::bytes()).as_deref(), Some("<|im_end|>"));
}

fn vocabulary() -> Tokenizer {
    let folder = crate::data::tokenizer::tests::folder(300);
    Tokenizer::open(&TokenizerSpec::Path(folder.path().into()), &SpecialTokens::new()).unwrap()
}

#[test]
fn tokens_that_begin_in_a_turn_are_learned() {
    let tokenizer = vocabulary();
    let chat = Chat::new(Some(Template::open("chatml").unwrap()), TrainOn::Assistant, tokenizer.clone());
    let encoded = chat.encode(&chat.render(&Line::parse(LINE).unwrap()).unwrap()).unwrap();
    let (flags, learns_end) = encoded.learned.unwrap();
    assert!(!learns_end && encoded.lengths.is_none());
    let learned: Vec<u32> = encoded.ids.iter().zip(&flags).filter(|(_, flag)| **flag).map(|(&id, _)| id).collect();
    assert_eq!(tokenizer.decode(&learned).unwrap(), "4<|im_end|>yes<|im_end|>");
    assert!(learned.contains(&tokenizer.id("<|im_end|>").unwrap()));
    // A line's end after the special token of a turn is no part of the turn, where it is found by rendering too.
    let plain = PLAIN.replace("</>", "<|im_end|>");
    let chat = Chat::new(Some(Template::new("test", &plain).unwrap()), TrainOn::Assistant, tokenizer.clone());
    let rendered = chat.render(&Line::parse(LINE).unwrap()).unwrap();
    let turns: Vec<&str> = rendered.learned.iter().map(|stretch| &rendered.text[stretch.clone()]).collect();
    assert_eq!((turns, rendered.learns_end), (vec!["4<|im_end|>", "yes<|im_end|>"], false));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Whatever the words: the learned tokens are those of the assistant's turns, and the text is the template's.
    #[test]
    fn any_words(words in prop::collection::vec(any::<String>(), 1..6)) {
        let tokenizer = vocabulary();
        let messages: Vec<_> = words.iter().enumerate().map(|(i, text)| {
            let text: String = text.chars().filter(|c| !('\u{fdd0}'..='\u{fdd1}').contains(c)).collect();
            let role = ["user", "assistant"][i % 2];
            serde_json::json!({"role": role, "content": text})
        }).collect();
        let line = Line::parse(&serde_json::json!({"messages": messages}).to_string()).unwrap();
        let marked = Chat::new(Some(Template::open("chatml").unwrap()), TrainOn::Assistant, tokenizer.clone());
        let rendered = marked.render(&line).unwrap();
        let expected: Vec<String> = messages.iter().skip(1).step_by(2)
            .map(|message| format!("{}<|im_end|>", message["content"].as_str().unwrap())).collect();
        let turns: Vec<&str> = rendered.learned.iter().map(|stretch| &rendered.text[stretch.clone()]).collect();
        prop_assert_eq!(turns, expected);
        let encoded = marked.encode(&rendered).unwrap();
        prop_assert_eq!(tokenizer.decode(&encoded.ids).unwrap(), rendered.text);
    }

    #[test]
    fn any_line_and_template_never_panic(line in any::<String>(), template in "[{}%a-z |.\\-'\"]{0,40}") {
        let _ = Line::parse(&line).map(|line| chat(Some(PLAIN), TrainOn::Assistant).render(&line));
        if let Ok(template) = Template::new("test", &template) {
            let _ = Chat::new(Some(template), TrainOn::Assistant, Tokenizer::bytes()).render(&Line::parse(LINE).unwrap());
        }
    }
}
