//! Ranks that are threads of one process.
//!
//! A collective is a round: every rank leaves its data in its slot, the last to arrive opens the round, every rank reads
//! what it needs, the last to leave closes it. Ranks must agree on operation and length; one that does not, or one that
//! does not come within the timeout, ends the run everywhere with a message that names it.

use super::Group;
use crate::error::{Error, Result};
use gantry_kernels::Real;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the ranks of a group share.
struct Shared<T> {
    name: String,
    size: usize,
    timeout: Duration,
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Default)]
struct Slot<T> {
    here: bool,
    what: &'static str,
    real: Vec<T>,
    int: Vec<i32>,
    wide: Vec<f64>,
}

struct State<T> {
    /// Collectives completed.
    round: u64,
    arrived: usize,
    left: usize,
    slots: Vec<Slot<T>>,
    mail: HashMap<(usize, usize), VecDeque<Vec<T>>>,
    /// Messages that were read, to be written again.
    spare: Vec<Vec<T>>,
    broken: Option<String>,
}

/// One rank's handle.
pub struct ThreadGroup<T> {
    rank: usize,
    /// Sums under way.
    sum: RefCell<Vec<T>>,
    shared: Arc<Shared<T>>,
}

/// Handles of a new group for its ranks, in rank order. `timeout`: how long a rank waits for the others.
pub fn group<T: Real>(name: &str, size: usize, timeout: Duration) -> Vec<ThreadGroup<T>> {
    let slots = (0..size)
        .map(|_| Slot { here: false, what: "", real: Vec::new(), int: Vec::new(), wide: Vec::new() })
        .collect();
    let state = State { round: 0, arrived: 0, left: 0, slots, mail: HashMap::new(), spare: Vec::new(), broken: None };
    let shared =
        Arc::new(Shared { name: name.into(), size, timeout, state: Mutex::new(state), changed: Condvar::new() });
    (0..size).map(|rank| ThreadGroup { rank, sum: RefCell::default(), shared: shared.clone() }).collect()
}

impl<T: Real> ThreadGroup<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready`, an abort, or the timeout.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<T>>,
        what: &str,
        ready: impl Fn(&State<T>) -> bool,
    ) -> Result<MutexGuard<'a, State<T>>> {
        let end = Instant::now() + self.shared.timeout;
        loop {
            if let Some(why) = &state.broken {
                return Err(Error::communication(why.clone()));
            }
            if ready(&state) {
                return Ok(state);
            }
            let now = Instant::now();
            if now >= end {
                let missing: Vec<String> =
                    (0..self.shared.size).filter(|&r| !state.slots[r].here).map(|r| r.to_string()).collect();
                let why = format!(
                    "group {:?}: {what} number {} waited {:.0} s for rank {}",
                    self.shared.name,
                    state.round,
                    self.shared.timeout.as_secs_f64(),
                    if missing.is_empty() { "messages".into() } else { missing.join(", ") }
                );
                state.broken = Some(why.clone());
                self.shared.changed.notify_all();
                return Err(Error::communication(why));
            }
            state = self.shared.changed.wait_timeout(state, end - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// One round: `put` fills this rank's slot, `get` reads everybody's.
    fn round<R>(
        &self,
        what: &'static str,
        put: impl FnOnce(&mut Slot<T>),
        get: impl FnOnce(&[Slot<T>]) -> Result<R>,
    ) -> Result<R> {
        let size = self.shared.size;
        let mut state = self.wait(self.lock(), what, |s| s.left == 0 || s.arrived < size)?;
        let slot = &mut state.slots[self.rank];
        (slot.here, slot.what) = (true, what);
        put(slot);
        state.arrived += 1;
        if state.arrived == size {
            self.shared.changed.notify_all();
        }
        let mut state = self.wait(state, what, |s| s.arrived == size)?;
        let result = match state.slots.iter().position(|slot| slot.what != what) {
            None => get(&state.slots),
            Some(other) => Err(Error::communication(format!(
                "group {:?}: rank {} is at {what} while rank {other} is at {}",
                self.shared.name, self.rank, state.slots[other].what
            ))),
        };
        if let Err(e) = &result {
            state.broken.get_or_insert(e.sentence.clone());
        }
        state.left += 1;
        if state.left == size {
            (state.arrived, state.left) = (0, 0);
            state.round += 1;
            state.slots.iter_mut().for_each(|slot| slot.here = false);
        }
        self.shared.changed.notify_all();
        result
    }

    fn check_len(&self, what: &str, have: usize, mine: usize) -> Result<()> {
        if have == mine {
            return Ok(());
        }
        Err(Error::communication(format!(
            "group {:?}: {what} of {mine} elements on rank {} meets {have} on another rank",
            self.shared.name, self.rank
        )))
    }
}

fn fill<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}

impl<T: Real> Group<T> for ThreadGroup<T> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn all_reduce(&self, x: &mut [T]) -> Result<()> {
        let what = "all_reduce";
        let put: &[T] = x;
        let len = put.len();
        let mut sum = self.sum.borrow_mut();
        sum.clear();
        sum.resize(len, T::ZERO);
        self.round(
            what,
            |slot| fill(&mut slot.real, put),
            |slots| {
                for slot in slots {
                    self.check_len(what, slot.real.len(), len)?;
                    sum.iter_mut().zip(&slot.real).for_each(|(s, &x)| *s += x);
                }
                Ok(())
            },
        )?;
        x.copy_from_slice(&sum);
        Ok(())
    }

    fn all_gather(&self, src: &[T], dst: &mut [T]) -> Result<()> {
        self.round(
            "all_gather",
            |slot| fill(&mut slot.real, src),
            |slots| {
                for (slot, dst) in slots.iter().zip(dst.chunks_mut(src.len().max(1))) {
                    self.check_len("all_gather", slot.real.len(), dst.len())?;
                    dst.copy_from_slice(&slot.real);
                }
                Ok(())
            },
        )
    }

    fn reduce_scatter(&self, src: &[T], dst: &mut [T]) -> Result<()> {
        let what = "reduce_scatter";
        self.round(
            what,
            |slot| fill(&mut slot.real, src),
            |slots| {
                dst.fill(T::ZERO);
                for slot in slots {
                    self.check_len(what, slot.real.len(), src.len())?;
                    let part = &slot.real[self.rank * dst.len()..][..dst.len()];
                    dst.iter_mut().zip(part).for_each(|(s, &x)| *s += x);
                }
                Ok(())
            },
        )
    }

    fn all_gather_i32(&self, src: &[i32], dst: &mut [i32]) -> Result<()> {
        self.round(
            "all_gather_i32",
            |slot| fill(&mut slot.int, src),
            |slots| {
                for (slot, dst) in slots.iter().zip(dst.chunks_mut(src.len().max(1))) {
                    self.check_len("all_gather_i32", slot.int.len(), dst.len())?;
                    dst.copy_from_slice(&slot.int);
                }
                Ok(())
            },
        )
    }

    fn all_reduce_f64(&self, x: &mut [f64]) -> Result<()> {
        let put: &[f64] = x;
        let mut sum = vec![0.0; put.len()];
        self.round(
            "all_reduce_f64",
            |slot| fill(&mut slot.wide, put),
            |slots| {
                for slot in slots {
                    self.check_len("all_reduce_f64", slot.wide.len(), sum.len())?;
                    sum.iter_mut().zip(&slot.wide).for_each(|(s, &x)| *s += x);
                }
                Ok(())
            },
        )?;
        x.copy_from_slice(&sum);
        Ok(())
    }

    fn send(&self, to: usize, x: &[T]) -> Result<()> {
        let mut state = self.lock();
        if let Some(why) = &state.broken {
            return Err(Error::communication(why.clone()));
        }
        let mut message = state.spare.pop().unwrap_or_default();
        fill(&mut message, x);
        state.mail.entry((self.rank, to)).or_default().push_back(message);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn recv(&self, from: usize, x: &mut [T]) -> Result<()> {
        let key = (from, self.rank);
        let mut state = self.wait(self.lock(), "recv", |s| s.mail.get(&key).is_some_and(|queue| !queue.is_empty()))?;
        let message = state.mail.get_mut(&key).and_then(VecDeque::pop_front).unwrap_or_default();
        self.check_len("recv", message.len(), x.len())?;
        x.copy_from_slice(&message);
        state.spare.push(message);
        Ok(())
    }

    fn abort(&self, why: &str) {
        let mut state = self.lock();
        state.broken.get_or_insert_with(|| why.to_string());
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<R: Send>(size: usize, timeout: f64, f: impl Fn(ThreadGroup<f64>) -> R + Sync) -> Vec<R> {
        let groups = group("test", size, Duration::from_secs_f64(timeout));
        std::thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| f(g))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn collectives_do_what_they_say_many_times() {
        let results = run(3, 10.0, |g| {
            for round in 0..50 {
                let mut x = [g.rank() as f64 + round as f64, 1.0];
                g.all_reduce(&mut x).unwrap();
                assert_eq!(x, [3.0 + 3.0 * round as f64, 3.0]);
                let mut all = [0.0; 3];
                g.all_gather(&[g.rank() as f64], &mut all).unwrap();
                assert_eq!(all, [0.0, 1.0, 2.0]);
                let mut part = [0.0];
                g.reduce_scatter(&[1.0, 2.0, 3.0], &mut part).unwrap();
                assert_eq!(part, [3.0 * (g.rank() + 1) as f64]);
            }
            g.send((g.rank() + 1) % 3, &[g.rank() as f64]).unwrap();
            let mut x = [0.0];
            g.recv((g.rank() + 2) % 3, &mut x).unwrap();
            x[0]
        });
        assert_eq!(results, [2.0, 0.0, 1.0]);
    }

    #[test]
    fn a_missing_rank_is_named() {
        let results = run(2, 0.2, |g| if g.rank() == 0 { g.all_reduce(&mut [1.0]).err() } else { None });
        let message = results[0].clone().unwrap().sentence;
        assert!(message.contains("all_reduce") && message.contains("rank 1"), "{message}");
    }

    #[test]
    fn different_operations_and_lengths_are_refused() {
        let results =
            run(
                2,
                5.0,
                |g| {
                    if g.rank() == 0 { g.all_reduce(&mut [1.0]) } else { g.all_gather(&[1.0], &mut [0.0, 0.0]) }
                },
            );
        assert!(results.iter().any(|r| r.as_ref().is_err_and(|e| e.sentence.contains("all_gather"))));
        let results = run(2, 5.0, |g| g.all_reduce(&mut vec![1.0; 1 + g.rank()]));
        assert!(results.iter().any(Result::is_err));
    }

    #[test]
    fn an_abort_reaches_everybody() {
        let results = run(2, 5.0, |g| {
            if g.rank() == 1 {
                g.abort("rank 1 ran out of luck");
                return None;
            }
            g.all_reduce(&mut [1.0]).err()
        });
        assert!(results[0].as_ref().unwrap().sentence.contains("out of luck"));
    }
}
