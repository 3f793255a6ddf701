//! What the documents show is what is in the repository: links, code, keys.

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

#[test]
fn the_recipe_guide_lists_every_key() {
    let defaults = read("host/src/recipe/defaults.yaml");
    let guide = read("docs/recipes.md");
    let Some(listed) = blocks(&guide, "yaml").into_iter().next_back() else { panic!("no list of keys") };
    for (line, (listed, default)) in listed.lines().zip(defaults.lines()).enumerate() {
        assert_eq!(listed, default, "line {}: copy defaults.yaml to the end of docs/recipes.md", line + 1);
    }
    assert_eq!(listed.lines().count(), defaults.lines().count(), "copy defaults.yaml to the end of docs/recipes.md");
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
