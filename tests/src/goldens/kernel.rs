//! Kernels launched by themselves, where no operator of the host has the operands a case has.

use gantry_kernels::{Args, Element, Kernel};

/// Operands of one launch.
pub struct Launch<T> {
    ins: Vec<Vec<T>>,
    ints: Vec<Vec<i32>>,
    outs: Vec<Vec<T>>,
    int_outs: Vec<Vec<i32>>,
}

impl<T: Element> Launch<T> {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Launch<T> {
        Launch { ins: Vec::new(), ints: Vec::new(), outs: Vec::new(), int_outs: Vec::new() }
    }

    /// Appends inputs.
    pub fn ins(&mut self, ins: &[&[f64]]) -> &mut Self {
        self.ins.extend(ins.iter().map(|x| x.iter().map(|&x| T::of(x)).collect::<Vec<T>>()));
        self
    }

    pub fn ints(&mut self, ints: &[&[i32]]) -> &mut Self {
        self.ints.extend(ints.iter().map(|x| x.to_vec()));
        self
    }

    /// Appends outputs of these lengths; they begin at zero, for kernels that add.
    pub fn outs(&mut self, lens: &[usize]) -> &mut Self {
        self.outs.extend(lens.iter().map(|&len| vec![T::ZERO; len]));
        self
    }

    /// Appends an output that begins with these values.
    pub fn out_from(&mut self, values: &[f64]) -> &mut Self {
        self.outs.push(values.iter().map(|&x| T::of(x)).collect());
        self
    }

    pub fn int_outs(&mut self, lens: &[usize]) -> &mut Self {
        self.int_outs.extend(lens.iter().map(|&len| vec![0; len]));
        self
    }

    pub fn run(&mut self, kernel: &dyn Kernel) {
        let mut work = vec![T::of(f64::NAN); kernel.workspace()];
        let ins: Vec<&[T]> = self.ins.iter().map(Vec::as_slice).collect();
        let ints: Vec<&[i32]> = self.ints.iter().map(Vec::as_slice).collect();
        let mut outs: Vec<&mut [T]> = self.outs.iter_mut().map(Vec::as_mut_slice).collect();
        let mut int_outs: Vec<&mut [i32]> = self.int_outs.iter_mut().map(Vec::as_mut_slice).collect();
        let args = Args { ins: &ins, outs: &mut outs, ints: &ints, int_outs: &mut int_outs, work: work.as_mut_slice() };
        T::launch(kernel, args);
    }

    pub fn out(&self, index: usize) -> Vec<f64> {
        self.outs[index].iter().map(|x| x.to_f64()).collect()
    }

    pub fn int_out(&self, index: usize) -> Vec<i32> {
        self.int_outs[index].clone()
    }
}

/// x [.., heads, width] with heads in stored order (head i in group i % groups) from logical order (group-major), or
/// `back`.
pub fn permute_heads(x: &[f64], heads: usize, groups: usize, width: usize, back: bool) -> Vec<f64> {
    let mut y = vec![f64::NAN; x.len()];
    for (from, to) in x.chunks(heads * width).zip(y.chunks_mut(heads * width)) {
        for logical in 0..heads {
            let (group, rank) = (logical / (heads / groups), logical % (heads / groups));
            let stored = rank * groups + group;
            let (from_head, to_head) = if back { (stored, logical) } else { (logical, stored) };
            to[to_head * width..][..width].copy_from_slice(&from[from_head * width..][..width]);
        }
    }
    y
}

/// [.., heads] in stored order.
pub fn heads_stored(x: &[f64], heads: usize, groups: usize) -> Vec<f64> {
    permute_heads(x, heads, groups, 1, false)
}

/// [.., heads] in logical order.
pub fn heads_last(x: &[f64], heads: usize, groups: usize) -> Vec<f64> {
    permute_heads(x, heads, groups, 1, true)
}
