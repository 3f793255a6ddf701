//! What the documents show is what is in the repository: links, code, keys. `GANTRY_BLESS=1` rewrites what is generated:
//! the schema of recipes, and the lists of keys in the recipe guide.

use gantry::recipe::editor;
use gantry_tests::json_schema::mistakes;
use gantry_tests::plugins::providers;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Bodies of the code blocks of a language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let open = format!("\n```{language}\n");
    text.split(&open).skip(1).map(|rest| rest.split("\n```").next().unwrap_or(rest)).collect()
}

fn documents() -> Vec<String> {
    let mut all: Vec<String> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(String::from).to_vec();
    for entry in std::fs::read_dir(root().join("docs")).expect("docs/ exists") {
        let name = entry.expect("an entry").file_name().into_string().expect("UTF-8");
        if name.ends_with(".md") {
            all.push(format!("docs/{name}"));
        }
    }
    all
}

#[test]
fn links_lead_to_files() {
    let mut links = 0;
    for document in documents() {
        let text = read(&document);
        let folder = root().join(&document).parent().expect("a folder").to_path_buf();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or("");
            if file.is_empty() || file.contains("://") {
                continue;
            }
            assert!(folder.join(file).exists(), "{document}: {link} leads nowhere");
            links += 1;
        }
    }
    assert!(links > 5, "only {links} links found");
}

#[test]
fn the_example_is_shown_as_it_is() {
    let source = read("providers/dense-gpt/src/lib.rs");
    for (document, least) in [("README.md", 1), ("docs/providers.md", 6)] {
        let text = read(document);
        let shown = blocks(&text, "rust");
        assert!(shown.len() >= least, "{document}: only {} blocks", shown.len());
        for block in shown {
            assert!(source.contains(block), "{document} shows what dense-gpt does not have:\n{block}");
        }
    }
}

/// Fails unless a generated file is as it would be generated now; with `GANTRY_BLESS=1` it is generated.
fn is_generated(path: &str, expected: &str) {
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(root().join(path), expected).unwrap();
    }
    let found = read(path);
    for (line, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{path}:{}: run this test with GANTRY_BLESS=1", line + 1);
    }
    assert_eq!(found, expected, "{path}: run this test with GANTRY_BLESS=1");
}

/// `text` with what stands between two markers, neither included, replaced.
fn between(text: &str, begin: &str, end: &str, new: &str) -> String {
    let (before, rest) = text.split_once(begin).unwrap_or_else(|| panic!("no {begin:?}"));
    let (_, after) = rest.split_once(end).unwrap_or_else(|| panic!("no {end:?}"));
    format!("{before}{begin}{new}{end}{after}")
}

#[test]
fn the_recipe_guide_lists_every_key() {
    let guide = read("docs/recipes.md");
    let mut table = "\n| key | takes | default |\n| --- | --- | --- |\n".to_string();
    for key in editor::reference() {
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        table += &format!("| `{}` | {} | {default} |\n", key.path, key.kind);
    }
    let guide = between(&guide, "<!-- keys: generated -->\n", "\n<!-- end of keys -->", &table);
    let defaults = read("host/src/recipe/defaults.yaml");
    is_generated("docs/recipes.md", &between(&guide, "copy true):\n\n```yaml\n", "\n```", defaults.trim_end()));
}

const SCHEMA: &str = "recipes/recipe.schema.json";

fn schema() -> Value {
    let set = providers(&["dense-gpt", "nemotron-hybrid"]);
    let all = set.plugins().iter().flat_map(|plugin| &plugin.providers);
    editor::json_schema(
        &all.map(|provider| (provider.name.clone(), provider.config_schema.clone())).collect::<Vec<_>>(),
    )
}

fn recipes() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in std::fs::read_dir(root().join("recipes")).unwrap().map(|entry| entry.unwrap().path()) {
        if folder.is_dir() {
            found.extend(std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found.retain(|file| file.extension().is_some_and(|end| end == "yaml"));
    assert!(found.len() >= 2, "{found:?}");
    found
}

#[test]
fn the_schema_for_editors_is_that_of_the_program() {
    is_generated(SCHEMA, &format!("{}\n", serde_json::to_string_pretty(&schema()).unwrap()));
    for recipe in recipes() {
        let text = std::fs::read_to_string(&recipe).unwrap();
        let named = text.lines().next().and_then(|line| line.strip_prefix("# yaml-language-server: $schema="));
        let file = recipe.parent().unwrap().join(named.unwrap_or_else(|| panic!("{}: no schema", recipe.display())));
        assert_eq!(file.canonicalize().unwrap(), root().join(SCHEMA).canonicalize().unwrap());
    }
}

#[test]
fn shipped_recipes_fit_the_schema_and_mistakes_do_not() {
    let schema = schema();
    for file in recipes() {
        let recipe: Value = serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(mistakes(&schema, &recipe), Vec::<String>::new(), "{}", file.display());
        let wrongs: [(&str, Value); 8] = [
            ("/trian", json!({})),
            ("/train/stepz", json!(3)),
            ("/train/steps", json!(-1)),
            ("/train/precision", json!("fp23")),
            ("/data/exclude", json!("one")),
            ("/modules/lm/grid", json!({"tpp": 1})),
            ("/modules/lm/config/hiden_size", json!(3)),
            ("/modules/lm/config/hidden_size", json!("wide")),
        ];
        for (at, value) in wrongs {
            let mut wrong = recipe.clone();
            // A section that a file extends may have is made.
            *at.split('/').skip(1).fold(&mut wrong, |inner, key| &mut inner[key]) = value;
            let marks = mistakes(&schema, &wrong);
            assert_eq!(marks.len(), 1, "{at} in {}: {marks:?}", file.display());
        }
    }
}

/// The architecture page names folders and files; a renamed one must not stay on the map.
#[test]
fn the_map_names_what_is_there() {
    let map = read("ARCHITECTURE.md");
    let roots =
        ["", "host/", "host/src/", "host/src/train/", "kernels/src/", "plugin-api/", "plugin-api/src/", "tests/tests/"];
    let mut paths = 0;
    for name in map.split('`').skip(1).step_by(2).filter(|name| !name.contains([' ', '*', '<', '('])) {
        let file = [".rs", ".md", ".yaml", ".toml", "/"].iter().any(|end| name.ends_with(end));
        if file && name.contains('/') || name.ends_with(".toml") {
            let there = roots.iter().any(|folder| root().join(folder).join(name).exists());
            assert!(there, "ARCHITECTURE.md names `{name}`, which is nowhere");
            paths += 1;
        }
    }
    assert!(paths > 20, "only {paths} paths found");
}

/// Keys that the guide for Megatron-LM's users names are keys of recipes or of the provider's config.
#[test]
fn the_guide_from_megatron_names_keys_that_exist() {
    let defaults = read("host/src/recipe/defaults.yaml");
    let config = read("providers/nemotron-hybrid/src/config.rs");
    // `section:` at the margin and `key:` inside it; `module:` stands for `modules.lm`, whose grid is one deeper.
    let known = |key: &str| {
        let (section, name) = key.split_once('.').expect("a dotted key");
        if let Some(option) = key.strip_prefix("modules.lm.config.") {
            return config.contains(&format!("    pub {option}: "));
        }
        let (section, indented) = match key.strip_prefix("modules.lm.") {
            Some(name) => (
                "module",
                match name.strip_prefix("grid.") {
                    Some(name) => format!("    {name}:"),
                    None => format!("  {name}:"),
                },
            ),
            None => match name.rsplit_once('.') {
                Some((_, name)) => (section, format!("    {name}:")),
                None => (section, format!("  {name}:")),
            },
        };
        let body = defaults.split(&format!("\n{section}:\n")).nth(1).expect("a section");
        body.lines()
            .take_while(|line| !line.starts_with(|c: char| c.is_ascii_alphabetic()))
            .any(|line| line.starts_with(&indented))
    };
    let guide = read("docs/coming-from-megatron.md");
    let mut keys = 0;
    for row in guide.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| argument")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let Some(target) = cells.get(1).filter(|cell| !cell.starts_with("---")) else { continue };
        match target.trim_matches('`') {
            "none" => assert!(cells.get(2).is_some_and(|why| !why.is_empty()), "{row}: none without a reason"),
            "not yet" => {}
            key => {
                assert!(known(key), "{row}: there is no key {key}");
                keys += 1;
            }
        }
    }
    assert!(keys > 60, "only {keys} keys found");
    assert!(!known("train.stepz") && !known("modules.lm.grid.dq") && !known("modules.lm.config.hidden"));
}
