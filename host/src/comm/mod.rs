//! Communication between the ranks of a group: one interface, one engine a file.
//!
//! Knows groups and slices; knows no meshes, programs or models. A sum is taken in rank order, so it does not depend on
//! who arrives first.

pub mod threads;

use crate::error::Result;
use gantry_kernels::Real;

/// A group of ranks as one of them sees it.
pub trait Group<T: Real>: Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// x = sum over ranks of x.
    fn all_reduce(&self, x: &mut [T]) -> Result<()>;
    /// dst = every rank's src in rank order.
    fn all_gather(&self, src: &[T], dst: &mut [T]) -> Result<()>;
    /// dst = this rank's part of the sum over ranks of src.
    fn reduce_scatter(&self, src: &[T], dst: &mut [T]) -> Result<()>;
    fn all_gather_i32(&self, src: &[i32], dst: &mut [i32]) -> Result<()>;
    /// Sum of host-side numbers over ranks.
    fn all_reduce_f64(&self, x: &mut [f64]) -> Result<()>;
    /// Sends to another rank of the group; returns when the message is on its way.
    fn send(&self, to: usize, x: &[T]) -> Result<()>;
    fn recv(&self, from: usize, x: &mut [T]) -> Result<()>;
    /// Ends every other rank's waiting with this error.
    fn abort(&self, why: &str);
}

/// A group of one.
pub struct Alone;

impl<T: Real> Group<T> for Alone {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn all_reduce(&self, _: &mut [T]) -> Result<()> {
        Ok(())
    }
    fn all_gather(&self, src: &[T], dst: &mut [T]) -> Result<()> {
        dst.copy_from_slice(src);
        Ok(())
    }
    fn reduce_scatter(&self, src: &[T], dst: &mut [T]) -> Result<()> {
        dst.copy_from_slice(src);
        Ok(())
    }
    fn all_gather_i32(&self, src: &[i32], dst: &mut [i32]) -> Result<()> {
        dst.copy_from_slice(src);
        Ok(())
    }
    fn all_reduce_f64(&self, _: &mut [f64]) -> Result<()> {
        Ok(())
    }
    fn send(&self, _: usize, _: &[T]) -> Result<()> {
        Err(crate::error::Error::communication("a group of one has nobody to send to"))
    }
    fn recv(&self, _: usize, _: &mut [T]) -> Result<()> {
        Err(crate::error::Error::communication("a group of one has nobody to receive from"))
    }
    fn abort(&self, _: &str) {}
}
