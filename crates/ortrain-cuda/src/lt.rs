//! NVIDIA's library cuBLASLt, for matrix products.
//!
//! Products are float32 without TF32, or float64. The library chooses an algorithm when a program is compiled: the first
//! of its list, without sums that are split between blocks, so that results have the same bits in every run.

use std::ffi::c_void;

use cudarc::cublaslt::{result, sys};
use ortrain_codegen::Binding;
use ortrain_expr::DType;
use ortrain_program::ALIGNMENT;

use crate::driver::{Address, Stream};
use crate::libraries::{Nvidia, open};
use crate::products::{Matrix, Product};

pub(crate) use cudarc::cublaslt::result::CublasError;

/// Maximum bytes of temporary memory for a product.
const MAX_WORKSPACE_BYTES: usize = 32 << 20;

/// Open library.
#[derive(Debug)]
pub(crate) struct Lt(sys::cublasLtHandle_t);

// SAFETY: the library allows every thread to use a handle, at the same time.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

/// Layout of a matrix.
#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: the layout was created, and is not used again.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Description of a product.
#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: the description was created, and is not used again.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// Settings of the search for an algorithm.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: the settings were created, and are not used again.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// Product that the library is ready to compute.
#[derive(Debug)]
pub(crate) struct Plan {
    description: Description,
    a: Layout,
    b: Layout,
    d: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Bytes of temporary memory.
    pub(crate) workspace: usize,
    is_double: bool,
    alpha: f64,
    beta: f64,
}

// SAFETY: descriptions are plain data of the library. A plan is used with the queue of its device locked.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// Addresses of a product.
pub(crate) struct Operands {
    pub(crate) a: Address,
    pub(crate) b: Address,
    pub(crate) d: Address,
    pub(crate) bias: Option<Address>,
    pub(crate) workspace: Address,
}

impl Lt {
    /// Opens the library; `None` if it is missing, or too old.
    pub(crate) fn open() -> Option<Lt> {
        open(Nvidia::CublasLt).ok()?;
        result::create_handle().ok().map(Lt)
    }

    /// Chooses an algorithm for a product; `None` if the library does not compute it.
    pub(crate) fn plan(&self, product: &Product) -> Option<Plan> {
        self.try_plan(product).ok()
    }

    fn try_plan(&self, product: &Product) -> Result<Plan, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Setting;
        let is_double = product.dtype == DType::F64;
        let (compute, scale) = match is_double {
            true => (sys::cublasComputeType_t::CUBLAS_COMPUTE_64F, sys::cudaDataType::CUDA_R_64F),
            false => (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F),
        };
        let description = Description(result::create_matmul_desc(compute, scale)?);
        let matrices = [
            (&product.a, Attribute::CUBLASLT_MATMUL_DESC_TRANSA),
            (&product.b, Attribute::CUBLASLT_MATMUL_DESC_TRANSB),
        ];
        for (matrix, attribute) in matrices {
            let transposition = i32::from(matrix.is_transposed);
            set_description(&description, attribute, &transposition)?;
        }
        if product.bias.is_some() {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            set_description(&description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let layout = |matrix: &Matrix| layout(matrix, scale, product.batch);
        let (a, b, d) = (layout(&product.a)?, layout(&product.b)?, layout(&product.d)?);
        let preference = Preference(result::create_matmul_pref()?);
        set_preference(
            &preference,
            Setting::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &(MAX_WORKSPACE_BYTES as u64),
        )?;
        let no_split = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        set_preference(&preference, Setting::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_split)?;
        for (setting, matrix) in [
            (Setting::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &product.a),
            (Setting::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &product.b),
            (Setting::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &product.d),
            (Setting::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &product.d),
        ] {
            set_preference(&preference, setting, &alignment(&matrix.memory))?;
        }
        // SAFETY: all descriptions were created above, and exist.
        let found = unsafe {
            result::get_matmul_algo_heuristic(self.0, description.0, a.0, b.0, d.0, d.0, preference.0)
        }?;
        Ok(Plan {
            description,
            a,
            b,
            d,
            algorithm: found.algo,
            workspace: found.workspaceSize,
            is_double,
            alpha: product.alpha,
            beta: product.beta,
        })
    }

    /// Enqueues a product.
    ///
    /// # Safety
    /// The operands are the allocated memory of the product of the plan, and a workspace of its size. The queue of the
    /// device is locked.
    pub(crate) unsafe fn enqueue(
        &self,
        stream: &Stream,
        plan: &Plan,
        operands: &Operands,
    ) -> Result<(), CublasError> {
        if let Some(bias) = operands.bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            set_description(&plan.description, attribute, &bias)?;
        }
        let (alpha, beta) = (plan.alpha as f32, plan.beta as f32);
        let scalars: [*const c_void; 2] = match plan.is_double {
            true => [(&raw const plan.alpha).cast(), (&raw const plan.beta).cast()],
            false => [(&raw const alpha).cast(), (&raw const beta).cast()],
        };
        let pointer = |address: Address| address as *mut c_void;
        // SAFETY: the contract of this function. Scalars are read before the call returns.
        unsafe {
            result::matmul(
                self.0,
                plan.description.0,
                scalars[0],
                scalars[1],
                pointer(operands.a),
                plan.a.0,
                pointer(operands.b),
                plan.b.0,
                pointer(operands.d),
                plan.d.0,
                pointer(operands.d),
                plan.d.0,
                &raw const plan.algorithm,
                pointer(operands.workspace),
                plan.workspace,
                stream.as_raw().cast(),
            )
        }
    }
}

/// Returns the alignment of a matrix. Memory is aligned to [`ALIGNMENT`], and the matrix starts at an offset.
fn alignment(memory: &Binding) -> u32 {
    let Binding::Bytes { start, .. } = memory else { return 1 };
    1 << (start | ALIGNMENT).trailing_zeros()
}

fn set_description<T>(
    description: &Description,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: the description exists, and the value has the size of its type.
    unsafe {
        result::set_matmul_desc_attribute(
            description.0,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn set_preference<T>(
    preference: &Preference,
    setting: sys::cublasLtMatmulPreferenceAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: the settings exist, and the value has the size of its type.
    unsafe {
        result::set_matmul_pref_attribute(
            preference.0,
            setting,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn layout(matrix: &Matrix, dtype: sys::cudaDataType, batch: usize) -> Result<Layout, CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let Matrix { rows, columns, leading, batch_stride, .. } = *matrix;
    let layout = Layout(result::create_matrix_layout(dtype, rows as u64, columns as u64, leading as i64)?);
    let set = |attribute, value: *const c_void, bytes| {
        // SAFETY: the layout exists, and the value has this size.
        unsafe { result::set_matrix_layout_attribute(layout.0, attribute, value, bytes) }
    };
    if batch > 1 {
        let (count, distance) = (batch as i32, batch_stride as i64);
        set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of::<i32>())?;
        set(
            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
            (&raw const distance).cast(),
            size_of::<i64>(),
        )?;
    }
    Ok(layout)
}
