//! The block on the GPU against the CPU.

use super::block::{self, Inputs, LARGE, Recorded, Results, SLICED, SMALL};
use super::faults::{FAULTS, spoilt, worst};
use super::{TOLERANCE, device, relative_l2};
use gantry::error::Result;
use gantry::program::replay::Phase;
use gantry::program::replay_cuda::{CudaReplay, DeviceMemory};
use gantry_kernels::cuda::Device;
use std::time::{Duration, Instant};

/// The block captured on a GPU.
struct Captured<'p> {
    block: &'p Recorded,
    memory: DeviceMemory,
    replay: CudaReplay<'p>,
}

impl<'p> Captured<'p> {
    fn new(block: &'p Recorded, device: &Device) -> Result<Captured<'p>> {
        let memory = DeviceMemory::new(device, block.table.param_len, block.table.buffer_len)?;
        let replay = CudaReplay::capture(&block.program, device, &memory, 1)?;
        Ok(Captured { block, memory, replay })
    }

    /// One step from the given inputs, in arenas full of NaN.
    fn run(&self, inputs: &Inputs<f32>) -> Result<Results<f32>> {
        let (x, dy, y, dx) = self.block.ids();
        self.memory.params.write(0, &inputs.params)?;
        self.memory.grads.write(0, &inputs.grads)?;
        self.replay.poison()?;
        self.replay.write(x, &inputs.x)?;
        self.replay.write(dy, &inputs.dy)?;
        self.replay.run(Phase::Forward)?;
        self.replay.run(Phase::Backward)?;
        let grads = self.memory.grads.read(0..self.block.table.param_len)?;
        Ok(self.block.results(self.replay.read(y)?, self.replay.read(dx)?, &grads))
    }
}

fn bits(results: &Results<f32>) -> Vec<Vec<u32>> {
    results.iter().map(|(_, values)| values.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn a_captured_program_gives_the_cpus_results() {
    let Some(device) = device() else { return };
    let (kernels, seconds) = device.compiled();
    println!("device: {} (cuBLASLt {})", device.name().unwrap(), device.blas_version());
    println!("kernels compiled: {kernels} in {:.2} s", seconds.as_secs_f64());
    for sizes in [SMALL, SLICED, LARGE] {
        let block = block::record(sizes, |_| ()).unwrap();
        let begin = Instant::now();
        let captured = Captured::new(&block, &device).unwrap();
        let capture = begin.elapsed();
        let plan = &block.program.plan;
        println!("\n{sizes:?}");
        println!(
            "  {} steps, {} + {} graph nodes, captured in {:.1} ms; arena {} bytes ({} without reuse), parameters {} bytes",
            block.program.graph.steps.len(),
            captured.replay.nodes(Phase::Forward),
            captured.replay.nodes(Phase::Backward),
            capture.as_secs_f64() * 1e3,
            4 * plan.act_len,
            4 * plan.act_without_reuse,
            4 * block.table.param_len,
        );
        let inputs = block.inputs::<f32>();
        let first = captured.run(&inputs).unwrap();
        let second = captured.run(&inputs).unwrap();
        assert!(bits(&first) == bits(&second), "{sizes:?}: two replays differ");
        let cpu = block.run_cpu(&inputs).unwrap();
        let exact = block.run_cpu(&block.inputs::<f64>()).unwrap();
        println!("  two replays: same bits\n  {:10} {:>12} {:>12} {:>12}", "", "GPU - CPU", "GPU - f64", "CPU - f64");
        for (((name, gpu), (_, cpu)), (_, exact)) in first.iter().zip(&cpu).zip(&exact) {
            let errors = [relative_l2(gpu, cpu), relative_l2(gpu, exact), relative_l2(cpu, exact)];
            println!("  {name:10} {:12.2e} {:12.2e} {:12.2e}", errors[0], errors[1], errors[2]);
        }
        let (name, error) = worst(&first, &cpu);
        assert!(error <= TOLERANCE, "{sizes:?}: {name} differs by {error:e}");
    }
}

#[test]
fn a_planted_fault_on_the_gpu_is_seen() {
    let Some(device) = device() else { return };
    for sizes in [SMALL, SLICED] {
        let right = block::record(sizes, |_| ()).unwrap();
        let inputs = right.inputs::<f32>();
        let cpu = right.run_cpu(&inputs).unwrap();
        for &(what, fault) in FAULTS {
            let wrong = spoilt(sizes, fault, what);
            let results = Captured::new(&wrong, &device).unwrap().run(&inputs).unwrap();
            let (name, error) = worst(&results, &cpu);
            println!("planted on the GPU ({} tokens): {what}: {name} off by {error:.2e}", sizes.tokens);
            assert!(error.is_nan() || error > 5.0 * TOLERANCE, "{what}: {error:e} would pass");
        }
    }
}

/// Times, printed and not asserted.
#[test]
fn time_of_a_replay() {
    let Some(device) = device() else { return };
    let block = block::record(LARGE, |_| ()).unwrap();
    let captured = Captured::new(&block, &device).unwrap();
    let inputs = block.inputs::<f32>();
    captured.run(&inputs).unwrap();
    const TIMES: usize = 200;
    for phase in [Phase::Forward, Phase::Backward] {
        captured.replay.time(phase, 20).unwrap();
    }
    let forward = median(captured.replay.time(Phase::Forward, TIMES).unwrap());
    let backward = median(captured.replay.time(Phase::Backward, TIMES).unwrap());
    let begin = Instant::now();
    for _ in 0..TIMES {
        captured.replay.run(Phase::Forward).unwrap();
        captured.replay.run(Phase::Backward).unwrap();
    }
    let queued = begin.elapsed() / TIMES as u32;
    device.synchronize().unwrap();
    let wall = begin.elapsed() / TIMES as u32;
    let cpu = median((0..3).map(|_| time_cpu(&block, &inputs)).collect());
    let (gpu, flops) = (forward + backward, block.flops());
    println!("{LARGE:?}: {:.1} GFLOP a step by count", flops * 1e-9);
    println!(
        "  GPU: {:.0} us forward + {:.0} us backward (medians of {TIMES} graph launches), {:.1} TFLOP/s in FP32; \
         back to back {:.0} us a step, of which the host spends {:.1} us launching",
        micros(forward),
        micros(backward),
        flops / gpu.as_secs_f64() * 1e-12,
        micros(wall),
        micros(queued)
    );
    println!(
        "  CPU: {cpu:.1?} ({} threads, median of 3, with allocation of the arena), {:.0} times the GPU",
        std::thread::available_parallelism().map_or(1, |n| n.get()),
        cpu.as_secs_f64() / gpu.as_secs_f64()
    );
    // The small block is all launches.
    let block = block::record(SMALL, |_| ()).unwrap();
    let captured = Captured::new(&block, &device).unwrap();
    captured.run(&block.inputs::<f32>()).unwrap();
    let small = |phase| median(captured.replay.time(phase, TIMES).unwrap());
    println!(
        "{SMALL:?}: {:.1} us forward + {:.1} us backward",
        micros(small(Phase::Forward)),
        micros(small(Phase::Backward))
    );
}

fn time_cpu(block: &Recorded, inputs: &Inputs<f32>) -> Duration {
    let begin = Instant::now();
    block.run_cpu(inputs).unwrap();
    begin.elapsed()
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
