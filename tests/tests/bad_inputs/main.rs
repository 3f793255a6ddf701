//! Everything a user can get wrong, and what the program says to it: status and whole stderr, row by row.
//!
//! `rows.rs` and `tokens.rs` are the table; `messages.txt` holds the answers, which are meant to be read: each one sentence that names the
//! place, the values and the remedy. `GANTRY_BLESS=1` rewrites them. In them `HERE` is the folder of the row, `BIN` that
//! of the program and its plugins, `PLUGINS` that of the plugins made for tests.

mod conversions;
mod rows;
mod tokens;

use gantry_tests::plugins::{file_name, fixture, gantry, providers};
use rows::{Row, Step};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const MESSAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bad_inputs/messages.txt");

/// A recipe that trains at once: rows change it.
const RECIPE: &str = "\
name: small
modules:
  lm:
    provider: dense-gpt
    config:
      num_layers: 2
      hidden_size: 16
      num_attention_heads: 2
      ffn_hidden_size: 32
      vocab_size: 257
data:
  paths: [text]
  extensions: [txt]
train:
  steps: 2
  seq_length: 16
  global_batch_size: 2
optimizer:
  lr: 1.0e-3
checkpoint: {every: 1}
log: {level: warn}
";

/// Where things are that rows name.
struct Places {
    /// A folder with a finished run in `runs/small`.
    trained: tempfile::TempDir,
    bin: PathBuf,
    plugins: PathBuf,
}

impl Places {
    fn new() -> Places {
        providers(&["dense-gpt", "nemotron-hybrid"]);
        let bin = gantry().parent().unwrap().to_path_buf();
        let plugins = fixture("not-a-plugin").parent().unwrap().to_path_buf();
        let trained = tempfile::tempdir().unwrap();
        let places = Places { trained, bin, plugins };
        begin(places.trained.path());
        let output = places.command(places.trained.path(), "train r.yaml").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        places
    }

    fn command(&self, folder: &Path, arguments: &str) -> Command {
        let mut command = Command::new(gantry());
        let arguments = arguments.split(' ').map(|argument| self.named(argument, folder));
        command.current_dir(folder).args(arguments.filter(|argument| !argument.is_empty()));
        // Nothing of the machine: no settings, no plugins of a user, no colours.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GANTRY_")) {
            command.env_remove(name);
        }
        command.env("HOME", folder.join("home")).env_remove("XDG_DATA_HOME").env("RUST_BACKTRACE", "0");
        // Build folders of some systems are writable by a group.
        command.env("GANTRY_ALLOW_WRITABLE_PLUGINS", "1").env("NO_COLOR", "1").stdin(Stdio::null());
        command
    }

    /// `HERE`, `BIN`, `PLUGINS` and `lib(NAME)` in a text of a row.
    fn named(&self, text: &str, folder: &Path) -> String {
        let mut text = text.replace("HERE", &folder.display().to_string());
        while let Some((before, rest)) = text.split_once("lib(") {
            let (name, after) = rest.split_once(')').unwrap();
            text = format!("{before}{}{after}", file_name(name));
        }
        let text = text.replace("BIN", &self.bin.display().to_string());
        text.replace("PLUGINS", &self.plugins.display().to_string())
    }

    /// What the program said, without what differs from machine to machine.
    fn general(&self, said: &str, folder: &Path) -> String {
        let mut said = said.to_string();
        let trained = self.trained.path();
        for (place, name) in
            [(folder, "HERE"), (trained, "TRAINED"), (self.plugins.as_path(), "PLUGINS"), (self.bin.as_path(), "BIN")]
        {
            said = said.replace(&place.display().to_string(), name);
        }
        // The size of a library that was built here.
        if let Some((before, after)) = said.split_once(" bytes are there")
            && let Some((before, _)) = before.rsplit_once(' ')
        {
            said = format!("{before} SIZE bytes are there{after}");
        }
        let mut general = String::new();
        for line in said.lines() {
            let words = line.split(' ').map(|word| {
                let plain = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
                if plain.len() == 64 && plain.chars().all(|c| c.is_ascii_hexdigit()) && plain.contains('e') {
                    return word.replace(plain, "SHA256");
                }
                // A line of source code.
                match word.split_once(".rs:") {
                    Some((file, _)) => {
                        format!("{}.rs:LINE)", file.rsplit('/').next().map(|f| format!("({f}")).unwrap())
                    }
                    None => word.to_string(),
                }
            });
            let words = words.collect::<Vec<_>>().join(" ");
            // The clock of a line of the log.
            let line = match words.trim_start().split_once(' ') {
                Some((clock, rest)) if clock.ends_with('s') && clock.trim_end_matches('s').parse::<f64>().is_ok() => {
                    format!("TIME {}", rest.trim_start())
                }
                _ => words,
            };
            general += line.trim_end();
            general.push('\n');
        }
        general
    }

    /// Runs a row: its block of `messages.txt`, and what is wrong with it besides.
    fn run(&self, row: &Row) -> (String, Option<String>) {
        let root = tempfile::tempdir().unwrap();
        let folder = &root.path().canonicalize().unwrap();
        begin(folder);
        let (mut environment, mut locks) = (Vec::new(), Vec::new());
        for step in row.steps {
            self.take(step, folder, &mut environment);
            if let Step::Lock(name, text) = step {
                std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
                std::fs::write(folder.join(name), text).unwrap();
                let file = std::fs::File::open(folder.join(name)).unwrap();
                file.lock().unwrap();
                locks.push(file);
            }
        }
        let mut command = self.command(folder, row.arguments);
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, self.named(value, folder)),
                None => command.env_remove(name),
            };
        }
        if row.steps.iter().any(|step| matches!(step, Step::FullStdout)) {
            command.stdout(std::fs::File::create("/dev/full").unwrap());
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let said = self.general(&stderr, folder);
        let status = output.status.code();
        let mut block = format!("== {} (exit {})\n", row.name, status.unwrap_or(-1));
        let _ = write!(block, "$ gantry {}\n{said}", row.arguments);
        let wrong = match status {
            found if found != Some(row.status) => Some(format!("exit {found:?}, expected {}", row.status)),
            _ if !stderr.contains("error: ") => Some("no sentence that begins with `error: `".into()),
            _ if stderr.contains("panicked at") || stderr.contains("stack backtrace") => Some("a panic".into()),
            _ => None,
        };
        (block, wrong)
    }

    fn take(&self, step: &Step, folder: &Path, environment: &mut Vec<(&'static str, Option<&'static str>)>) {
        let at = |name: &str| folder.join(name);
        let recipe = || std::fs::read_to_string(at("r.yaml")).unwrap();
        match *step {
            Step::Write(name, text) => {
                std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
                std::fs::write(at(name), self.named(text, folder)).unwrap();
            }
            Step::Bytes(name, bytes) => std::fs::write(at(name), bytes).unwrap(),
            Step::Large(name, length) => std::fs::write(at(name), "# comment\n".repeat(length / 10)).unwrap(),
            Step::Append(text) => std::fs::write(at("r.yaml"), recipe() + &self.named(text, folder)).unwrap(),
            Step::Replace(old, new) => {
                assert!(recipe().contains(old), "the recipe has no {old:?}");
                std::fs::write(at("r.yaml"), recipe().replacen(old, &self.named(new, folder), 1)).unwrap();
            }
            Step::Folder(name) => std::fs::create_dir_all(at(name)).unwrap(),
            Step::Remove(name) => {
                let path = at(name);
                if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
            }
            Step::Pipe(name) => assert!(Command::new("mkfifo").arg(at(name)).status().unwrap().success()),
            Step::Environment(name, value) => environment.push((name, Some(value))),
            Step::Without(name) => environment.push((name, None)),
            Step::Copy(from, to, mode) => {
                std::fs::copy(self.named(from, folder), at(to)).unwrap();
                assert!(Command::new("chmod").arg(mode).arg(at(to)).status().unwrap().success());
            }
            Step::Trained => copy(&self.trained.path().join("runs"), &at("runs")),
            Step::Cut(name, length) => {
                let bytes = std::fs::read(at(name)).unwrap();
                std::fs::write(at(name), &bytes[..length]).unwrap();
            }
            Step::Flip(name) => {
                let mut bytes = std::fs::read(at(name)).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(at(name), bytes).unwrap();
            }
            Step::Edit(name, old, new) => {
                let text = std::fs::read_to_string(at(name)).unwrap();
                assert!(text.contains(old), "{name} has no {old:?}");
                std::fs::write(at(name), text.replace(old, new)).unwrap();
            }
            Step::Lock(..) | Step::FullStdout => {}
        }
    }
}

/// The recipe and its text.
fn begin(folder: &Path) {
    std::fs::create_dir(folder.join("text")).unwrap();
    std::fs::write(folder.join("text/a.txt"), "The quick brown fox jumps over the lazy dog.\n".repeat(8)).unwrap();
    std::fs::write(folder.join("text/b.txt"), "Pack my box with five dozen liquor jugs.\n".repeat(8)).unwrap();
    std::fs::write(folder.join("r.yaml"), RECIPE).unwrap();
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// The blocks of `messages.txt` by their first line.
fn blocks(text: &str) -> BTreeMap<&str, &str> {
    let starts = text.match_indices("== ").map(|(at, _)| at).filter(|&at| at == 0 || text[..at].ends_with("\n\n"));
    let starts: Vec<usize> = starts.chain([text.len()]).collect();
    let parts = starts.windows(2).map(|pair| text[pair[0]..pair[1]].trim_end());
    parts.map(|part| (part.lines().next().unwrap(), part)).collect()
}

#[test]
fn every_mistake_has_its_status_and_its_sentence() {
    let (places, rows) = (Places::new(), rows::all());
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let answer = places.run(row);
                    answers.lock().unwrap().insert(row.name, answer);
                }
            });
        }
    });
    let answers = answers.into_inner().unwrap();
    assert_eq!(answers.len(), rows.len(), "two rows have one name");
    assert!(rows.len() >= 40);
    let wrong: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            let (block, wrong) = &answers[row.name];
            wrong.as_ref().map(|wrong| format!("{wrong}:\n{block}"))
        })
        .collect();
    let text = rows.iter().map(|row| answers[row.name].0.as_str()).collect::<Vec<_>>().join("\n");
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(MESSAGES, &text).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let kept = std::fs::read_to_string(MESSAGES).unwrap_or_default();
    let (kept, now) = (blocks(&kept), blocks(&text));
    let changed: Vec<String> = now
        .iter()
        .filter(|(name, block)| kept.get(*name) != Some(*block))
        .map(|(name, block)| format!("{block}\n-- messages.txt has:\n{}", kept.get(name).unwrap_or(&"nothing")))
        .collect();
    assert!(changed.is_empty(), "read them, and run this test with GANTRY_BLESS=1:\n{}", changed.join("\n\n"));
    assert_eq!(kept.len(), now.len(), "messages.txt has rows that are gone: run this test with GANTRY_BLESS=1");
}
