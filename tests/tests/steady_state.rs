//! After warm-up a training step or an evaluation makes no call into a plugin and allocates no tensor, and recomputation
//! changes memory but not one bit of a gradient.
//!
//! One test function, because the counts are the whole process's.
#![allow(unsafe_code)] // A global allocator is unsafe to write; this one only counts.

use gantry::data::Batch;
use gantry::mesh::Grid;
use gantry::optim::update::StepHyper;
use gantry::plugin::watch::calls;
use gantry::train::team::{Kind, Team};
use gantry_tests::layouts::{ADAM, Trace, batch, collect, hybrid, spec, worst};
use serde_json::{Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting what could be a tensor: anything of at least [`TENSOR`] bytes that is not a buffer of
/// the matrix product library.
struct Counting;

/// Less than the smallest activation of the narrow model: 24 tokens of 16 channels.
const TENSOR: usize = 1024;

static BYTES: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    if bytes >= TENSOR && !gantry_kernels::cpu::gemm_call::in_product() {
        BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of steps and of evaluations between them, after warm-up: the fewest bytes that one allocates, and the plugin calls of
/// all. Then the number of programs recorded.
fn steady(config: Value, grid: Grid) -> ([(usize, u64); 2], usize) {
    let team = Team::<f32>::start(&spec("nemotron-hybrid", config, grid)).unwrap_or_else(|e| panic!("{e}"));
    let dp = grid.dp;
    let batches = || (0..4).map(|i| batch(1, i)).collect::<Vec<_>>();
    let step = |step: u64, batches: Vec<Batch>| {
        let batches: Arc<Vec<_>> = Arc::new(batches.into_iter().map(Arc::new).enumerate().collect());
        let go = move |rank: &mut gantry::train::rank::Rank<f32>| {
            let mine: Vec<_> = batches.iter().filter(|(i, _)| i % dp == rank.model.place.dp).cloned().collect();
            rank.gradients(step, &mine)?;
            rank.update(&ADAM, StepHyper { lr: 1e-3, weight_decay: 0.0, step })
        };
        team.all(go).map(drop).unwrap();
    };
    let evaluate = |step: u64, batches: Vec<Batch>| team.evaluate(step, batches).map(drop).unwrap();
    let ways: [&dyn Fn(u64, Vec<Batch>); 2] = [&step, &evaluate];
    (1..=3).for_each(|n| ways.iter().for_each(|way| way(n, batches())));
    let mut counts = [(usize::MAX, 0); 2];
    // A tensor would be allocated every time; the queues of the thread pool grow now and then.
    for n in 4..12 {
        for (way, (fewest, called)) in ways.iter().zip(&mut counts) {
            let batches = batches();
            let before = (BYTES.load(Ordering::Relaxed), calls());
            way(n, batches);
            *fewest = (*fewest).min(BYTES.load(Ordering::Relaxed) - before.0);
            *called += calls() - before.1;
        }
    }
    (counts, team.all(|rank| Ok(rank.programs())).unwrap()[0])
}

fn wide() -> Value {
    let mut config = hybrid();
    for (key, value) in [("hidden_size", 128), ("ffn_hidden_size", 160), ("moe_ffn_hidden_size", 96)] {
        config[key] = json!(value);
    }
    config
}

fn gradients(recompute: Value) -> (Trace, usize) {
    let mut config = hybrid();
    config["recompute"] = recompute;
    let team = Team::<f64>::start(&spec("nemotron-hybrid", config, Grid::SINGLE)).unwrap_or_else(|e| panic!("{e}"));
    let bytes = team
        .all(|rank| {
            rank.gradients(1, &[(0, Arc::new(batch(1, 0))), (1, Arc::new(batch(1, 1)))])?;
            Ok(rank.activation_bytes().0)
        })
        .unwrap()[0];
    let mut trace = Trace::default();
    collect(&team, Kind::Grads, &mut trace).unwrap();
    (trace, bytes)
}

#[test]
fn steps_after_warm_up_only_replay() {
    let (dp, pp) = (Grid { dp: 2, ..Grid::SINGLE }, Grid { pp: 2, ..Grid::SINGLE });
    for grid in [Grid::SINGLE, dp, pp, Grid { tp: 2, sequence_parallel: true, ..Grid::SINGLE }] {
        let ((narrow, programs), (wide, _)) = (steady(hybrid(), grid), steady(wide(), grid));
        println!(
            "{grid:?}: (bytes, plugin calls) {narrow:?} at hidden 16, {wide:?} at hidden 128, {programs} programs"
        );
        assert_eq!((narrow, wide), ([(0, 0); 2], [(0, 0); 2]), "of steps and of evaluations");
        assert_eq!(programs, 2);
    }

    let (kept, kept_bytes) = gradients(json!([]));
    let (again, again_bytes) = gradients(json!(["mamba", "attention", "mlp", "moe"]));
    assert_eq!(worst(&kept, &again).0, 0.0, "recomputation repeats the forward bit by bit");
    println!("activations: {kept_bytes} bytes kept, {again_bytes} with recomputation");
    assert!(again_bytes < kept_bytes, "{again_bytes} bytes with recomputation, {kept_bytes} without");
}
