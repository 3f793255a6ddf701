//! Runs that are killed, at moments that include the writing of checkpoints, go on bit by bit, and whatever a kill leaves
//! behind, every checkpoint is complete or absent.
//!
//! `GANTRY_KILLS` says how often the run is killed; 40 is what is run before a release.

use gantry::checkpoint::CheckpointReader;
use gantry_kernels::philox::{Stream, stream_of};
use gantry_tests::runs::{RECIPE, Runs, signal};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const KILLS: usize = 6;

/// Checkpoints every other step, some kept for good, the best by the held-out loss.
fn runs() -> Runs {
    let often = "checkpoint: {every: 2, keep_last: 2, keep_every: 20, keep_best: true}";
    let recipe = RECIPE.replace("checkpoint: {every: 6}", often);
    let recipe = recipe.replace("train: {", "train: {eval_every: 2, ");
    Runs::of(&recipe.replace("data: {", "data: {valid_fraction: 0.1, "))
}

fn start(runs: &Runs, run: &str) -> Child {
    runs.command(&["train", "r.yaml", "--run-dir", run]).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits, looking often, until something holds; fails the test after two minutes or when the program ends.
fn wait_until(child: &mut Child, what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        if let Some(status) = child.try_wait().unwrap() {
            panic!("the run ended ({status}) before {what}");
        }
        assert!(began.elapsed() < Duration::from_secs(120), "no {what} after two minutes");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn names(runs: &Runs, run: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(runs.checkpoints(run)) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The folder of a save under way.
fn save_under_way(runs: &Runs, run: &str) -> Option<String> {
    names(runs, run).into_iter().find(|name| name.starts_with(".new-step-"))
}

/// What a kill interrupted, by what it left.
#[derive(Debug, Default)]
struct Hits {
    /// A checkpoint half written.
    writing: usize,
    /// A checkpoint complete that `latest` does not name, or a file `latest` or `best` half written.
    naming: usize,
    /// An old checkpoint half removed.
    removing: usize,
    /// Nothing: between saves.
    none: usize,
}

impl Hits {
    fn note(&mut self, runs: &Runs, run: &str) {
        let names = names(runs, run);
        let left = |begin: &str| names.iter().any(|name| name.starts_with(begin));
        let newest = names.iter().rfind(|name| name.starts_with("step-"));
        let latest = std::fs::read_to_string(runs.checkpoints(run).join("latest")).ok();
        let behind = newest.is_some_and(|newest| latest.is_none_or(|latest| latest.trim() != newest));
        match () {
            () if left(".new-step-") => self.writing += 1,
            () if left(".new-latest") || left(".new-best") || behind => self.naming += 1,
            () if left(".new-removed-") => self.removing += 1,
            () => self.none += 1,
        }
    }
}

/// Every checkpoint there is can be read, and what `latest` names is there.
fn all_are_complete(runs: &Runs, run: &str) {
    for name in names(runs, run).iter().filter(|name| name.starts_with("step-")) {
        CheckpointReader::open(&runs.checkpoints(run).join(name)).unwrap_or_else(|e| panic!("{e}"));
    }
    for pointer in ["latest", "best"] {
        if let Ok(name) = std::fs::read_to_string(runs.checkpoints(run).join(pointer)) {
            assert!(runs.checkpoints(run).join(name.trim()).is_dir(), "{pointer} names {name}");
        }
    }
}

#[test]
fn killed_runs_repeat_an_uninterrupted_one() {
    let kills = std::env::var("GANTRY_KILLS").map_or(KILLS, |n| n.parse().expect("GANTRY_KILLS is a number"));
    let runs = runs();
    // Something to go on from; builds the program, too.
    runs.train("killed", "4", &[]);
    let draws = Stream::new(20, stream_of("kills"), 0);
    let mut hits = Hits::default();
    let mut resumed = Vec::new();
    for kill in 0..kills as u64 {
        let [kind, how_long, ..] = draws.words(kill);
        let mut child = start(&runs, "killed");
        // Up to this many more steps, or saves.
        let more = 1 + u64::from(how_long % 5);
        let delay = Duration::from_micros(u64::from(how_long / 5 % 15_000));
        match kind % 8 {
            // While the program starts.
            0 => std::thread::sleep(delay * 20),
            1 | 2 => {
                let steps = runs.metrics("killed").len() as u64 + more;
                wait_until(&mut child, "that step", || runs.metrics("killed").len() as u64 >= steps);
                std::thread::sleep(delay);
            }
            // On sight of a save, or a little later.
            kind => {
                let mut seen = std::collections::BTreeSet::new();
                wait_until(&mut child, "a save", || {
                    seen.extend(save_under_way(&runs, "killed"));
                    seen.len() as u64 >= more.min(3)
                });
                if kind >= 5 {
                    std::thread::sleep(delay / 4);
                }
            }
        }
        // SIGKILL.
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None);
        hits.note(&runs, "killed");
        all_are_complete(&runs, "killed");
        resumed.push(runs.latest("killed"));
    }
    let last = runs.metrics("killed").len() + 3;
    runs.train("killed", &last.to_string(), &[]);
    runs.train("whole", &last.to_string(), &[]);
    let during = hits.writing + hits.naming + hits.removing;
    println!("{kills} kills, {during} during a save: {hits:?}; resumed from {resumed:?}");
    let (whole, killed) = (runs.metrics("whole"), runs.metrics("killed"));
    assert_eq!((whole.len(), killed.len()), (last, last));
    for (whole, killed) in whole.iter().zip(&killed) {
        assert_eq!(whole, killed);
    }
    assert_eq!(runs.hashes("whole", last as u64), runs.hashes("killed", last as u64));
    // The same checkpoints stay, the best among them, and nothing else.
    assert_eq!(names(&runs, "whole"), names(&runs, "killed"));
    let best = |run: &str| std::fs::read_to_string(runs.checkpoints(run).join("best")).unwrap();
    assert_eq!(best("whole"), best("killed"));
    assert!(during * 4 >= kills, "only {during} of {kills} kills hit a save");
}

#[test]
fn a_stop_signal_during_a_save_waits_for_it() {
    let runs = runs();
    runs.train("run", "1", &[]);
    for _ in 0..5 {
        let mut child = start(&runs, "run");
        wait_until(&mut child, "a save", || save_under_way(&runs, "run").is_some());
        signal(&child, "-TERM");
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert_eq!(runs.latest("run"), format!("step-{:08}", runs.metrics("run").len()));
        assert!(names(&runs, "run").iter().all(|name| !name.starts_with('.')));
        all_are_complete(&runs, "run");
    }
    let last = runs.metrics("run").len() as u64;
    runs.train("whole", &last.to_string(), &[]);
    assert_eq!(runs.hashes("whole", last), runs.hashes("run", last));
}
