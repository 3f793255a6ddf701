//! Jinja templates of conversations, as Hugging Face's programs render them.
//!
//! Lines that hold a tag leave no blank behind (`trim_blocks`, `lstrip_blocks`); `raise_exception` and `tojson` are as
//! there, and strings, lists and mappings have Python's methods. `strftime_now` is not there: a text that depends on the
//! day it is read would be another one after a stop. `{% generation %}` .. `{% endgeneration %}` become marks that are
//! taken out of the text again.

use super::line::Message;
use crate::data::Tokenizer;
use crate::failure::{Failure, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Instructions of a rendering; more are a loop without end.
const FUEL: u64 = 50_000_000;
/// Noncharacters: no text has them.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

const CHATML: &str = "\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
";

/// A template, ready to render.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    marks: bool,
}

impl Template {
    /// Compiles a template; `name` is what messages call it.
    pub fn new(name: &str, source: &str) -> Result<Template> {
        let (marked, marks) = with_marks(source);
        let mut environment = Environment::new();
        let broken = |error: Error| {
            Failure::data(format!("chat template {name}: {}", words(&error)))
                .remedy("correct the template, or name another in data.chat.template")
        };
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |what: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat", marked).map_err(broken)?;
        Ok(Template { environment, source: source.into(), marks })
    }

    /// What a recipe names: `chatml` or a file.
    pub fn open(name: &str) -> Result<Template> {
        if name == "chatml" {
            return Template::new(name, CHATML);
        }
        let source = std::fs::read_to_string(Path::new(name)).map_err(|error| {
            Failure::data(format!("cannot read chat template {name}: {error}"))
                .remedy("correct data.chat.template: a file, or chatml")
        })?;
        Template::new(name, &source)
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it says itself what is generated.
    pub fn marks(&self) -> bool {
        self.marks
    }

    /// The text of messages and the stretches that the template marks; `ask`: with the beginning of the assistant's turn.
    pub(super) fn render(
        &self,
        messages: &[Message],
        more: &[(String, Value)],
        ask: bool,
        tokenizer: &Tokenizer,
    ) -> Result<(String, Vec<Range<usize>>), String> {
        let messages: Vec<Value> = messages.iter().map(|message| message.value.clone()).collect();
        self.render_values(Value::from(messages), more, ask, tokenizer)
    }

    fn render_values(
        &self,
        messages: Value,
        more: &[(String, Value)],
        ask: bool,
        tokenizer: &Tokenizer,
    ) -> Result<(String, Vec<Range<usize>>), String> {
        let named = tokenizer.named().iter().map(|(name, content)| (name.clone(), Value::from(content.as_str())));
        let own = [("messages".to_string(), messages), ("add_generation_prompt".to_string(), Value::from(ask))];
        let variables: BTreeMap<String, Value> = named.chain(more.iter().cloned()).chain(own).collect();
        let template = self.environment.get_template("chat").map_err(|error| words(&error))?;
        let text =
            template.render(Value::from(variables)).map_err(|error| format!("the template: {}", words(&error)))?;
        unmarked(&text)
    }

    /// What follows the assistant's words in its turn, without blanks.
    pub fn closing(&self, tokenizer: &Tokenizer) -> Option<String> {
        const WORDS: &str = "\u{fdd2}";
        let turn = |role: &str, content: &str| minijinja::context! { role => role, content => content };
        let messages = Value::from(vec![turn("user", "question"), turn("assistant", WORDS)]);
        let (text, _) = self.render_values(messages, &[], false, tokenizer).ok()?;
        let closing = text.split_once(WORDS)?.1.trim();
        (!closing.is_empty()).then(|| closing.to_string())
    }

    /// The text of a question, with the beginning of the answer.
    pub fn ask(&self, question: &str, tokenizer: &Tokenizer) -> Result<String> {
        let message = minijinja::context! { role => "user", content => question };
        let rendered = self.render_values(Value::from(vec![message]), &[], true, tokenizer);
        rendered.map(|(text, _)| text).map_err(Failure::data)
    }
}

/// An error of the engine in one line.
fn words(error: &Error) -> String {
    let line = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
    let what = error.detail().map(str::to_string).unwrap_or_else(|| error.kind().to_string());
    format!("{line}{}", what.lines().next().unwrap_or_default())
}

/// A template with marks instead of generation tags, and whether it has any.
fn with_marks(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut marks) = (String::new(), source, false);
    while let Some(at) = rest.find("{%") {
        // The end is not part of the beginning, as in `{%}`.
        let Some(length) = rest[at + 2..].find("%}").map(|length| length + 2) else { break };
        let tag = &rest[at + 2..at + length];
        let left = if tag.starts_with(['-', '+']) { &tag[..1] } else { "" };
        let right = if tag.len() > left.len() && tag.ends_with(['-', '+']) { &tag[tag.len() - 1..] } else { "" };
        let mark = match tag[left.len()..tag.len() - right.len()].trim() {
            "generation" => Some(BEGIN),
            "endgeneration" => Some(END),
            _ => None,
        };
        out.push_str(&rest[..at]);
        match mark {
            // A tag that writes the mark and treats blanks around it as the other would.
            Some(mark) => {
                out.push_str(&format!("{{%{left} if true %}}{{{{ '{mark}' }}}}{{% endif {right}%}}"));
                marks = true;
            }
            None => out.push_str(&rest[at..at + length + 2]),
        }
        rest = &rest[at + length + 2..];
    }
    out.push_str(rest);
    (out, marks)
}

/// A text without its marks, and where they stood.
fn unmarked(marked: &str) -> Result<(String, Vec<Range<usize>>), String> {
    let (mut text, mut stretches, mut open) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match (c, open) {
            (BEGIN, None) => open = Some(text.len()),
            (END, Some(begin)) => {
                stretches.push(begin..text.len());
                open = None;
            }
            (BEGIN | END, _) => return Err("the marks of {% generation %} are not in pairs".into()),
            (c, _) => text.push(c),
        }
    }
    if open.is_some() {
        return Err("the marks of {% generation %} are not in pairs".into());
    }
    Ok((text, stretches))
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let done = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
        Some(width) => {
            let blanks = " ".repeat(width.min(64));
            let formatter = PrettyFormatter::with_indent(blanks.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
    };
    let bad = |what: String| Error::new(ErrorKind::BadSerialization, what);
    done.map_err(|error| bad(error.to_string()))?;
    String::from_utf8(out).map(Value::from).map_err(|error| bad(error.to_string()))
}

/// One line with a space after commas and colons.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
