//! cuBLASLt: one matrix product on row-major operands, in FP32 with FP32 sums (no TF32).
//!
//! cuBLASLt is column-major. A row-major matrix read as column-major is its transpose, so C = op(A) op(B) is asked for as
//! C^T = op(B)^T op(A)^T: B goes first, and each operand keeps its own transposition flag.

use super::error::{Error, Result};
use super::launch::Matrix;
use super::memory::Allocation;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaStream;
use std::ffi::c_void;
use std::sync::Arc;

/// C[m, n] = alpha op(A)[m, k] op(B)[k, n], added to C when `acc`. A is stored [m, k], or [k, m] with `ta`; B is stored
/// [k, n], or [n, k] with `tb`.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub ta: bool,
    pub b: Matrix,
    pub tb: bool,
    pub c: Matrix,
    pub alpha: f32,
    pub acc: bool,
}

/// The library's handle and its scratch, which the products of one stream share.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    work: Arc<Allocation>,
}

// SAFETY: cuBLASLt handles may be used from several threads; the scratch is used in the order of one stream.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// What NVIDIA recommends for Hopper.
const WORK_BYTES: usize = 32 << 20;

impl Blas {
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        stream.context().bind_to_thread()?;
        let work = Allocation::new(stream, WORK_BYTES)?;
        Ok(Blas { handle: result::create_handle()?, work })
    }

    pub fn version(&self) -> usize {
        // SAFETY: takes nothing and returns a number.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Launches the product with the algorithm the library thinks best.
    ///
    /// # Safety
    /// Every operand lies inside live device memory, m, n and k are not 0, and C overlaps neither A nor B.
    pub unsafe fn product(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        stream.context().bind_to_thread()?;
        let desc = Desc(result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )?);
        use sys::cublasLtMatmulDescAttributes_t::{CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB};
        desc.set(CUBLASLT_MATMUL_DESC_TRANSA, &operation(p.tb))?;
        desc.set(CUBLASLT_MATMUL_DESC_TRANSB, &operation(p.ta))?;
        // Stored [rows, cols] row-major is [cols, rows] column-major.
        let layout = |rows: usize, cols: usize, ld: usize| -> Result<Layout> {
            // The stride of a single row is not used, but must not be smaller than the row.
            let ld = ld.max(cols) as i64;
            Ok(Layout(result::create_matrix_layout(sys::cudaDataType::CUDA_R_32F, cols as u64, rows as u64, ld)?))
        };
        let first = if p.tb { layout(p.n, p.k, p.b.ld)? } else { layout(p.k, p.n, p.b.ld)? };
        let second = if p.ta { layout(p.k, p.m, p.a.ld)? } else { layout(p.m, p.k, p.a.ld)? };
        let out = layout(p.m, p.n, p.c.ld)?;

        let preference = Preference(result::create_matmul_pref()?);
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &self.work.bytes())?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment(p.b.ptr))?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment(p.a.ptr))?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment(p.c.ptr))?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment(p.c.ptr))?;
        let shape = || format!("product [{}, {}] x [{}, {}]", p.m, p.k, p.k, p.n);
        // SAFETY: all descriptors were created above and live to the end of this function.
        let best = unsafe {
            result::get_matmul_algo_heuristic(self.handle, desc.0, first.0, second.0, out.0, out.0, preference.0)
        }
        .map_err(|e| Error::from(e).at(shape()))?;
        let (alpha, beta) = (p.alpha, if p.acc { 1.0f32 } else { 0.0 });
        // SAFETY: the operands are live and large enough (the caller's promise), the scratch has the size stated in the
        // preference and is shared only along this stream, alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                desc.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                p.b.ptr as *const c_void,
                first.0,
                p.a.ptr as *const c_void,
                second.0,
                p.c.ptr as *const c_void,
                out.0,
                p.c.ptr as *mut c_void,
                out.0,
                &best.algo,
                self.work.ptr() as *mut c_void,
                self.work.bytes(),
                stream.cu_stream().cast(),
            )
        }
        .map_err(|e| Error::from(e).at(shape()))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. A failure only leaks the library's memory.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn operation(transposed: bool) -> i32 {
    if transposed { 1 } else { 0 }
}

/// Bytes an address is a multiple of, up to what the library distinguishes.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(8)
}

struct Desc(sys::cublasLtMatmulDesc_t);
struct Layout(sys::cublasLtMatrixLayout_t);
struct Preference(sys::cublasLtMatmulPreference_t);

impl Desc {
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: a live descriptor; the value is read in full before the call returns.
        Ok(unsafe { result::set_matmul_desc_attribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>()) }?)
    }
}

impl Preference {
    fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<()> {
        // SAFETY: as above.
        Ok(unsafe { result::set_matmul_pref_attribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>()) }?)
    }
}

// SAFETY of the three: created once, destroyed once; a failure only leaks a few bytes.
impl Drop for Desc {
    fn drop(&mut self) {
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}
impl Drop for Layout {
    fn drop(&mut self) {
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}
impl Drop for Preference {
    fn drop(&mut self) {
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
