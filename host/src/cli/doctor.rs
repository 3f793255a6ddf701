//! `gantry doctor`: what this machine offers and what is missing.
//!
//! Libraries and plugins are opened by child processes, so that one that crashes is reported. Nothing of a GPU or a cluster
//! is needed; the status is 0 when a recipe can be trained on the CPU.

use super::{args, inspect, print};
use crate::failure::{Cause, Failure, Result};
use crate::plugin::find::libraries;
use crate::plugin::{PluginFile, Search};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A library that GPUs or clusters need: name, what it is for, what to do where it is missing.
const LIBRARIES: [(&str, &str, &str); 6] = [
    ("driver", "runs programs on the GPU", "install NVIDIA's driver, and give a container the GPU (--gpus all)"),
    ("nvrtc", "compiles the kernels", "pip install nvidia-cuda-nvrtc and set GANTRY_NVRTC to its libnvrtc.so.13"),
    ("cublaslt", "matrix products", "pip install nvidia-cublas and set GANTRY_CUBLASLT to its libcublasLt.so.13"),
    ("cudnn", "further kernels", "pip install nvidia-cudnn-cu13 and put its lib folder on LD_LIBRARY_PATH"),
    ("nccl", "several GPUs", "pip install nvidia-nccl-cu13 and put its lib folder on LD_LIBRARY_PATH"),
    ("mpi", "several machines", "install Open MPI or MPICH"),
];

/// Memory below which even the quick start does not fit.
const LEAST_MEMORY: u64 = 256 << 20;
/// Room for a checkpoint or two of the quick start.
const LEAST_DISK: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// Not there, and training on the CPU does not need it.
    Missing,
    /// Something training on the CPU needs.
    Fault,
}

#[derive(Clone, Debug, Serialize)]
struct Finding {
    group: &'static str,
    name: String,
    state: State,
    value: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    #[serde(skip)]
    cause: Cause,
}

impl Finding {
    fn ok(group: &'static str, name: &str, value: String) -> Finding {
        Finding { group, name: name.into(), state: State::Ok, value, remedy: None, cause: Cause::Data }
    }

    fn not(state: State, group: &'static str, name: &str, value: String, remedy: impl Into<String>) -> Finding {
        Finding { state, remedy: Some(remedy.into()), ..Finding::ok(group, name, value) }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    plugin_api: String,
    /// Whether a recipe can be trained on the CPU.
    ready: bool,
    findings: Vec<Finding>,
}

pub(super) fn run(arguments: args::Doctor) -> Result<()> {
    if let Some(name) = arguments.library {
        return print(&probe(&name));
    }
    let mut findings = machine();
    findings.extend(LIBRARIES.iter().map(|&(name, purpose, remedy)| library(name, purpose, remedy)));
    findings.extend(plugins(&Search::standard(Vec::new())));
    let api = (gantry_plugin_api::abi::hello::API_MAJOR, gantry_plugin_api::abi::hello::API_MINOR);
    let fault = findings.iter().find(|finding| finding.state == State::Fault).cloned();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        plugin_api: format!("{}.{}", api.0, api.1),
        ready: fault.is_none(),
        findings,
    };
    if arguments.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::data(error.to_string()))?;
        print(&format!("{text}\n"))?;
    } else {
        print(&human(&report))?;
    }
    match fault {
        None => Ok(()),
        Some(fault) => {
            let failure = Failure::new(fault.cause, format!("not ready to train: {}: {}", fault.name, fault.value));
            Err(fault.remedy.into_iter().fold(failure, |failure, remedy| failure.remedy(remedy)))
        }
    }
}

fn human(report: &Report) -> String {
    let mut text = format!("gantry {} (plugin API {})\n", report.version, report.plugin_api);
    let mut group = "";
    // Writing to a String cannot fail.
    for finding in &report.findings {
        if finding.group != group {
            group = finding.group;
            let _ = writeln!(text, "\n{group}");
        }
        let state = match finding.state {
            State::Ok => "ok",
            State::Missing => "missing",
            State::Fault => "FAULT",
        };
        let _ = writeln!(text, "  {state:8} {:16} {}", finding.name, finding.value);
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(text, "  {:8} {:16} to do: {remedy}", "", "");
        }
    }
    if report.ready {
        let _ = writeln!(text, "\nready to train on the CPU");
    }
    text
}

fn machine() -> Vec<Finding> {
    const GROUP: &str = "machine";
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let mut all = vec![Finding::ok(GROUP, "cpu", format!("{model}, {cores} cores for this process"))];
    let (level, remedy) = vectors();
    all.push(match remedy {
        None => Finding::ok(GROUP, "vectors", level.into()),
        Some(remedy) => Finding::not(State::Missing, GROUP, "vectors", level.into(), remedy),
    });
    let about = read("/proc/meminfo");
    let bytes = |name: &str| {
        let kilobytes = field(&about, name)?;
        Some(kilobytes.strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
    };
    // A container's own limit, where it has one.
    let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().unwrap_or(u64::MAX);
    all.push(match (bytes("MemAvailable"), bytes("MemTotal")) {
        (Some(free), Some(total)) => {
            let (free, total) = (free.min(limit), total.min(limit));
            let value = format!("{} available of {}", size(free), size(total));
            match free >= LEAST_MEMORY {
                true => Finding::ok(GROUP, "memory", value),
                false => Finding::not(State::Fault, GROUP, "memory", value, "end other programs"),
            }
        }
        _ => Finding::not(State::Missing, GROUP, "memory", "unknown".into(), "mount /proc"),
    });
    all.push(disk(Path::new(".")));
    all
}

/// Room and permission for run folders below a folder.
fn disk(folder: &Path) -> Finding {
    const GROUP: &str = "machine";
    let shown = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    let fault = |value: String| {
        Finding::not(
            State::Fault,
            GROUP,
            "disk",
            value,
            "make room, or go to another folder, or name one with --run-dir",
        )
    };
    if let Err(error) = tempfile::tempfile_in(folder) {
        return fault(format!("nothing can be written to {}: {error}", shown.display()));
    }
    match rustix::fs::statvfs(folder) {
        Ok(about) => {
            let free = about.f_bavail.saturating_mul(about.f_frsize);
            let value = format!("{} free in {}", size(free), shown.display());
            if free >= LEAST_DISK { Finding::ok(GROUP, "disk", value) } else { fault(value) }
        }
        Err(error) => fault(format!("{}: {error}", shown.display())),
    }
}

/// The vector instructions that matrix products and kernels use here, and what to do if they are slow ones.
fn vectors() -> (&'static str, Option<&'static str>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let wide = has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq") && has!("avx512vl");
        match (wide, has!("avx2") && has!("fma")) {
            (true, _) => ("AVX-512, used by matrix products and kernels", None),
            (_, true) => ("AVX2 with FMA, used by matrix products and kernels", None),
            _ => (
                "SSE2 only: several times slower",
                Some("use a CPU, or a virtual machine's CPU model, with AVX2 and FMA"),
            ),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        ("those every processor of this kind has", None)
    }
}

/// The value of a line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let line =
        text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with(':')))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// What a child process of ours printed, or why it printed nothing.
fn child(arguments: &[&str]) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_string()),
        false => Err(format!("opening it ended the process with {}", output.status)),
    }
}

const FOUND: &str = "found ";

/// In the child: `found NAME VERSION`, or why it was not.
fn probe(name: &str) -> String {
    #[cfg(feature = "cuda")]
    if let Some(runtime) = gantry_kernels::cuda::Runtime::ALL.into_iter().find(|runtime| runtime.name() == name) {
        return match runtime.probe() {
            Ok((library, version)) => format!("{FOUND}{library}: {version}\n"),
            Err(why) => format!("{why}\n"),
        };
    }
    format!("this gantry was built without the feature cuda, which opens {name}\n")
}

fn library(name: &'static str, purpose: &str, remedy: &str) -> Finding {
    let group = "GPU and cluster (nothing of it is needed on the CPU)";
    let said = child(&["doctor", "--library", name]).unwrap_or_else(|why| why);
    match said.strip_prefix(FOUND) {
        // A driver that sees no GPU is as good as none.
        Some(found) if !found.contains("no GPU: ") => Finding::ok(group, name, found.into()),
        Some(found) => Finding::not(State::Missing, group, name, found.into(), remedy),
        None => Finding::not(State::Missing, group, name, format!("{said} ({purpose})"), remedy),
    }
}

/// Every plugin file of the places that are searched, and whether it loads.
fn plugins(search: &Search) -> Vec<Finding> {
    const GROUP: &str = "plugins";
    let mut all = Vec::new();
    let mut models = 0;
    for path in search.folders.iter().flat_map(|folder| libraries(folder)) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match inspect::ask_child(&PluginFile::new(&path), &[]) {
            Ok(report) => {
                models += report.models.len();
                let plugin = report.plugin;
                let providers: Vec<_> = plugin
                    .providers
                    .iter()
                    .map(|provider| format!("{} {}", format!("{:?}", provider.kind).to_lowercase(), provider.name))
                    .collect();
                let value =
                    format!("{}, API {}: {} ({})", plugin.version, plugin.api, providers.join(", "), path.display());
                all.push(Finding::ok(GROUP, &plugin.name, value));
            }
            // Other libraries may lie beside ours.
            Err(failure) if failure.sentence.contains("not a Gantry plugin") => {}
            Err(failure) => {
                let remedy = failure.remedy.unwrap_or_else(|| "build it again, or remove it".into());
                all.push(Finding::not(State::Missing, GROUP, &name, failure.sentence, remedy));
            }
        }
    }
    if models == 0 {
        let places: Vec<_> = search.folders.iter().map(|folder| folder.display().to_string()).collect();
        let value = format!("no plugin with a model loads from {}", places.join(", "));
        let remedy = "build the providers (cargo build --release), or name their folder in GANTRY_PLUGIN_PATH";
        all.push(Finding { cause: Cause::Plugin, ..Finding::not(State::Fault, GROUP, "models", value, remedy) });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        let text = "MemTotal:       100 kB\nMemAvailable:    50 kB\nmodel name\t: A CPU\n";
        assert_eq!(field(text, "MemAvailable").as_deref(), Some("50 kB"));
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU"));
        assert_eq!(field(text, "Mem"), None);
    }

    #[test]
    fn this_machine_has_what_the_tests_need() {
        for finding in machine() {
            assert_ne!(finding.state, State::Fault, "{finding:?}");
        }
    }

    #[test]
    fn a_folder_that_takes_nothing_is_a_fault() {
        let finding = disk(Path::new("/proc"));
        assert_eq!(finding.state, State::Fault);
        assert!(finding.value.starts_with("nothing can be written to /proc: "), "{finding:?}");
    }

    #[test]
    fn no_plugin_is_a_fault_of_plugins() {
        let empty = tempfile::tempdir().unwrap();
        let found = plugins(&Search { folders: vec![empty.path().into()], ..Search::default() });
        assert_eq!((found.len(), found[0].state, found[0].cause), (1, State::Fault, Cause::Plugin));
        assert!(found[0].value.contains(&empty.path().display().to_string()));
    }

    #[test]
    fn the_report_names_faults_and_remedies() {
        let findings = vec![
            Finding::ok("machine", "cpu", "two".into()),
            Finding::not(State::Fault, "machine", "disk", "full".into(), "make room"),
        ];
        let text = human(&Report { version: "1", plugin_api: "1.0".into(), ready: false, findings });
        assert!(text.contains("ok       cpu              two\n"), "{text}");
        assert!(text.contains("FAULT    disk             full\n") && text.contains("to do: make room\n"), "{text}");
        assert!(!text.contains("ready"));
    }
}
