//! Liveness and the memory plan: every storage of a program gets a place in one arena per element type.
//!
//! Storages that are alive at the same step never overlap. The plan is greedy by size: the largest storage goes first,
//! each at the lowest offset that is free during its life.

use super::graph::{Action, Graph, Space, StorageId};

/// Elements that every storage is aligned to: 64 bytes of f32.
const ALIGN: usize = 16;

/// Places of a program's storages.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// First element of each storage in its space.
    pub offsets: Vec<usize>,
    /// Elements of the real arena.
    pub act_len: usize,
    /// Elements of the i32 arena.
    pub int_len: usize,
    /// Sum of all real storages, had none shared memory: for reports.
    pub act_without_reuse: usize,
}

/// First and last step that touches each storage; `None` if no step does.
pub fn lives(g: &Graph) -> Vec<Option<(usize, usize)>> {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; g.storages.len()];
    for (i, step) in g.steps.iter().enumerate() {
        let mut touch = |storage: StorageId| {
            let life = lives[storage.0 as usize].get_or_insert((i, i));
            life.1 = i;
        };
        match &step.action {
            Action::Launch { ins, outs, ints, int_outs, work, .. } => {
                ins.iter().chain(outs).chain(ints).chain(int_outs).for_each(|o| touch(o.storage));
                work.iter().copied().for_each(touch);
            }
            Action::Collective { src, dst, .. } => {
                touch(src.storage);
                touch(dst.storage);
            }
        }
    }
    for (life, storage) in lives.iter_mut().zip(&g.storages) {
        if storage.pinned {
            *life = Some((0, g.steps.len()));
        }
    }
    lives
}

/// Plans the memory of a finished record.
pub fn plan(g: &Graph) -> Plan {
    let lives = lives(g);
    let mut plan = Plan { offsets: vec![0; g.storages.len()], ..Plan::default() };
    for (offset, storage) in plan.offsets.iter_mut().zip(&g.storages) {
        *offset = storage.fixed.unwrap_or(0);
    }
    plan.act_len = place(g, &lives, Space::Act, &mut plan.offsets);
    plan.int_len = place(g, &lives, Space::Int, &mut plan.offsets);
    plan.act_without_reuse = g.storages.iter().filter(|s| s.space == Space::Act).map(|s| s.len).sum();
    plan
}

fn place(g: &Graph, lives: &[Option<(usize, usize)>], space: Space, offsets: &mut [usize]) -> usize {
    struct Item {
        storage: usize,
        len: usize,
        life: (usize, usize),
        offset: usize,
    }
    let mut items: Vec<Item> = g
        .storages
        .iter()
        .enumerate()
        .filter(|(_, s)| s.space == space && s.len > 0)
        .filter_map(|(storage, s)| {
            lives[storage].map(|life| Item { storage, len: s.len.next_multiple_of(ALIGN), life, offset: 0 })
        })
        .collect();
    items.sort_by_key(|item| (std::cmp::Reverse(item.len), item.life.0, item.storage));
    let mut placed: Vec<Item> = Vec::with_capacity(items.len()); // Sorted by offset.
    let mut total = 0;
    for mut item in items {
        let mut at = 0;
        for other in &placed {
            if other.life.0 > item.life.1 || item.life.0 > other.life.1 {
                continue;
            }
            if at + item.len <= other.offset {
                break;
            }
            at = at.max(other.offset + other.len);
        }
        item.offset = at;
        offsets[item.storage] = at;
        total = total.max(at + item.len);
        let index = placed.partition_point(|other| other.offset <= at);
        placed.insert(index, item);
    }
    total
}
