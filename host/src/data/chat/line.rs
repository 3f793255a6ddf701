//! A line of a file of conversations.

use serde_json::Value;

/// What a line holds.
#[derive(Clone, Debug)]
pub(in crate::data) enum Line {
    Text(String),
    Completion {
        prompt: String,
        completion: String,
    },
    Messages {
        messages: Vec<Message>,
        /// Messages that belong to the prompt, where the line tells it from its completion.
        prompt: usize,
        /// Other variables of the template: `tools`, `documents` and those in `chat_template_kwargs`.
        more: Vec<(String, minijinja::Value)>,
    },
}

/// A turn of a conversation.
#[derive(Clone, Debug)]
pub(in crate::data) struct Message {
    pub role: String,
    /// All of it, as the template sees it.
    pub value: minijinja::Value,
}

impl Message {
    #[cfg(test)]
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.into(), value: minijinja::context! { role => role, content => content } }
    }
}

/// The kinds of lines there are, for messages.
const KINDS: &str = "messages, conversations, prompt with completion, or text";

impl Line {
    /// The text of a line of documents: that of `key`.
    pub fn document(line: &str, key: &str) -> Result<String, String> {
        let object: Value = serde_json::from_str(line).map_err(|error| no_json(&error))?;
        match object.get(key) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(format!("`{key}` is {}, expected text", kind(other))),
            None => Err(format!("no `{key}` in it{}", keys(&object))),
        }
    }

    /// Reads a conversation. What is wrong with it in words.
    pub fn parse(line: &str) -> Result<Line, String> {
        let object: Value = serde_json::from_str(line).map_err(|error| no_json(&error))?;
        if !object.is_object() {
            return Err(format!("it is {}, expected an object with {KINDS}", kind(&object)));
        }
        // Keys stay in order for the template.
        let ordered: minijinja::Value = serde_json::from_str(line).map_err(|error| no_json(&error))?;
        let list = |key: &str| messages(key, &object[key], &ordered.get_attr(key).unwrap_or_default());
        if let Some(key) = ["messages", "conversations", "conversation"].into_iter().find(|key| !object[*key].is_null())
        {
            return Ok(Line::Messages { messages: list(key)?, prompt: 0, more: more(&object, &ordered) });
        }
        match (&object["prompt"], &object["completion"], &object["text"]) {
            (Value::String(prompt), Value::String(completion), _) => {
                Ok(Line::Completion { prompt: prompt.clone(), completion: completion.clone() })
            }
            (Value::Array(_), Value::Array(_), _) => {
                let mut all = list("prompt")?;
                let prompt = all.len();
                all.extend(list("completion")?);
                Ok(Line::Messages { messages: all, prompt, more: more(&object, &ordered) })
            }
            (Value::Null, Value::Null, Value::String(text)) => Ok(Line::Text(text.clone())),
            (Value::Null, Value::Null, _) => Err(format!("expected {KINDS}{}", keys(&object))),
            (prompt, completion, _) => Err(format!(
                "`prompt` is {} and `completion` {}; expected two texts or two lists of messages",
                kind(prompt),
                kind(completion)
            )),
        }
    }
}

fn messages(key: &str, list: &Value, ordered: &minijinja::Value) -> Result<Vec<Message>, String> {
    let Value::Array(list) = list else { return Err(format!("`{key}` is {}, expected a list", kind(list))) };
    if list.is_empty() {
        return Err(format!("`{key}` is empty"));
    }
    let message = |(i, message): (usize, &Value)| {
        let place = format!("`{key}` message {}", i + 1);
        if !message.is_object() {
            return Err(format!("{place} is {}, expected an object", kind(message)));
        }
        let [role, content] = match message["from"].is_string() {
            true => ["from", "value"],
            false => ["role", "content"],
        };
        let Value::String(who) = &message[role] else {
            return Err(format!("{place}: `{role}` is {}, expected text", kind(&message[role])));
        };
        match &message[content] {
            Value::String(_) | Value::Array(_) => {}
            // A call of a tool has no content.
            Value::Null if message.get("tool_calls").is_some() => {}
            other => return Err(format!("{place}: `{content}` is {}, expected text", kind(other))),
        }
        let value = ordered.get_item_by_index(i).unwrap_or_default();
        if role == "role" {
            return Ok(Message { role: who.clone(), value });
        }
        let who = match who.as_str() {
            "human" => "user",
            "gpt" | "chatgpt" | "bot" | "model" => "assistant",
            other => other,
        };
        let content = value.get_attr(content).unwrap_or_default();
        Ok(Message { role: who.into(), value: minijinja::context! { role => who, content => content } })
    };
    list.iter().enumerate().map(message).collect()
}

fn more(object: &Value, ordered: &minijinja::Value) -> Vec<(String, minijinja::Value)> {
    let get = |from: &minijinja::Value, key: &str| from.get_attr(key).unwrap_or_default();
    let given = ["tools", "documents"].into_iter().filter(|key| !object[*key].is_null());
    let given = given.map(|key| (key.to_string(), get(ordered, key)));
    let options = get(ordered, "chat_template_kwargs");
    let names = object["chat_template_kwargs"].as_object().into_iter().flatten().map(|(name, _)| name.clone());
    given.chain(names.map(|name| (name.clone(), get(&options, &name)))).collect()
}

fn no_json(error: &serde_json::Error) -> String {
    // The line is that of the file, which the caller names.
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    format!("no JSON: {what} (column {})", error.column())
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "missing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn keys(object: &Value) -> String {
    let keys: Vec<&str> = object.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).take(8).collect();
    if keys.is_empty() { String::new() } else { format!("; its keys are {}", keys.join(", ")) }
}
