//! Whether a run fits into the memory of its machine, before it takes any.

use super::plan::{PlanReport, size};
use crate::error::{Error, Result};

/// Refuses a plan that needs more than `available` bytes. All ranks are threads of this process.
pub fn check(plan: &PlanReport, available: u64) -> Result<()> {
    let sum = |part: fn(&super::plan::MemoryReport) -> usize| plan.ranks.iter().map(|rank| part(&rank.memory)).sum();
    let parts: [(&str, usize); 8] = [
        ("parameters and buffers", sum(|memory| memory.parameters + memory.buffers)),
        ("gradients", sum(|memory| memory.gradients)),
        ("optimizer state", sum(|memory| memory.optimizer)),
        ("activations", sum(|memory| memory.activations)),
        ("communication and records", sum(|memory| memory.communication + memory.record)),
        ("the teacher", sum(|memory| memory.teacher)),
        ("copies while a checkpoint is written", plan.process.checkpoint),
        ("batches of a step and those made ahead", plan.process.data),
    ];
    let needed = parts.iter().fold(0_usize, |sum, (_, bytes)| sum.saturating_add(*bytes));
    if needed as u64 <= available {
        return Ok(());
    }
    let available = usize::try_from(available).unwrap_or(usize::MAX);
    let mut failure = Error::recipe(format!(
        "the run needs {} of memory, {} are available on this machine",
        size(needed),
        size(available)
    ));
    for (what, bytes) in parts {
        failure = failure.detail(format!("{what}: {}", size(bytes)));
    }
    Err(failure.remedy(if needed - plan.process.checkpoint <= available {
        "set checkpoint.async to false, which saves the copies, or make the model smaller"
    } else if needed - plan.process.data <= available {
        "make train.global_batch_size or data.prefetch smaller"
    } else {
        "make the model, train.micro_batch_size or train.seq_length smaller, or use a machine with more memory"
    }))
}

#[cfg(test)]
mod tests {
    use super::super::footprint::ProcessMemory;
    use super::super::plan::{GridReport, MemoryReport, PlanReport, RankReport};
    use super::*;

    fn plan(ranks: usize, checkpoint: usize) -> PlanReport {
        let memory = MemoryReport {
            parameters: 100,
            gradients: 100,
            optimizer: 200,
            buffers: 1,
            activations: 500,
            communication: 90,
            record: 9,
            teacher: 0,
            total: 1000,
        };
        let rank = RankReport { memory, ..RankReport::default() };
        PlanReport {
            ranks: vec![rank; ranks],
            process: ProcessMemory { checkpoint, ..ProcessMemory::default() },
            grid: GridReport { ranks, ..GridReport::default() },
            ..PlanReport::default()
        }
    }

    #[test]
    fn all_ranks_and_the_copies_count() {
        check(&plan(2, 0), 2000).unwrap();
        let failure = check(&plan(2, 300), 2299).unwrap_err();
        assert_eq!(failure.sentence, "the run needs 2.2 KiB of memory, 2.2 KiB are available on this machine");
        assert_eq!(failure.details[0], "parameters and buffers: 202 B");
        assert_eq!(failure.details[6], "copies while a checkpoint is written: 300 B");
        assert!(failure.remedy.unwrap().starts_with("set checkpoint.async to false"));
        assert_eq!(failure.cause as u8, 2);
        check(&plan(2, 300), 2300).unwrap();
        let failure = check(&plan(2, 300), 1999).unwrap_err();
        assert!(failure.remedy.unwrap().starts_with("make the model"));
    }

    #[test]
    fn batches_count() {
        let mut plan = plan(1, 0);
        plan.process.data = 5000;
        check(&plan, 6000).unwrap();
        let failure = check(&plan, 5999).unwrap_err();
        assert_eq!(failure.details[7], "batches of a step and those made ahead: 4.9 KiB");
        assert!(failure.remedy.unwrap().contains("train.global_batch_size"));
    }
}
