//! Tensor type of all crates: an immutable array of numbers.

use std::fmt;

use bytemuck::Pod;
use bytes::Bytes;
use ortrain_expr::PowerRounding;

use crate::DType;

/// Error of creating a tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The number of elements or bytes does not fit the address space.
    #[error("a tensor of shape {dims:?} and type {dtype} is too large to address")]
    TooLarge {
        /// Shape of the tensor.
        dims: Vec<usize>,
        /// Element type.
        dtype: DType,
    },
    /// The number of bytes does not match shape and element type.
    #[error("a tensor of shape {dims:?} and type {dtype} needs {expected} bytes but has {found}")]
    WrongLength {
        /// Shape of the tensor.
        dims: Vec<usize>,
        /// Element type.
        dtype: DType,
        /// Required number of bytes.
        expected: usize,
        /// Actual number of bytes.
        found: usize,
    },
}

/// Immutable tensor: element type, shape, and little-endian elements in row-major order.
///
/// The payload is a reference-counted byte range. A clone is therefore cheap, and a tensor can be a range of a loaded
/// file. A `bool` is one byte, 0 or 1. The bytes need not be aligned.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Tensor {
    dtype: DType,
    dims: Vec<usize>,
    data: Bytes,
}

/// Returns the number of bytes of a tensor.
///
/// # Errors
/// [`TensorError::TooLarge`] if the product overflows `isize`.
pub fn byte_length(dtype: DType, dims: &[usize]) -> Result<usize, TensorError> {
    // Zeros are left out of the product: [2^40, 2^40, 0] has no elements, but must still be refused.
    dims.iter()
        .filter(|&&dim| dim != 0)
        .try_fold(dtype.size(), |total, &dim| {
            total.checked_mul(dim).filter(|&bytes| isize::try_from(bytes).is_ok())
        })
        .map(|bytes| if dims.contains(&0) { 0 } else { bytes })
        .ok_or_else(|| TensorError::TooLarge { dims: dims.to_vec(), dtype })
}

/// Copies bytes to a multiple of `alignment`, so that the result shares no memory with `bytes`. If the allocation
/// fails, returns `bytes` itself.
///
/// # Panics
/// Panics if `alignment` is not a power of two.
#[must_use]
pub fn aligned_copy(bytes: &Bytes, alignment: usize) -> Bytes {
    assert!(alignment.is_power_of_two(), "alignment {alignment} is not a power of two");
    let mut padded: Vec<u8> = Vec::new();
    if bytes.is_empty() || padded.try_reserve_exact(bytes.len().saturating_add(alignment - 1)).is_err() {
        return bytes.clone();
    }
    let skipped = padded.as_ptr().addr().wrapping_neg() % alignment;
    padded.resize(skipped, 0);
    padded.extend_from_slice(bytes);
    Bytes::from(padded).slice(skipped..)
}

/// Rounds a number to an element type, and returns its bytes.
fn rounded(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        DType::I8 => (value as i8).to_le_bytes().to_vec(),
        DType::I16 => (value as i16).to_le_bytes().to_vec(),
        DType::I32 => (value as i32).to_le_bytes().to_vec(),
        DType::I64 => (value as i64).to_le_bytes().to_vec(),
        DType::U8 => vec![value as u8],
        DType::U16 => (value as u16).to_le_bytes().to_vec(),
        DType::U32 => (value as u32).to_le_bytes().to_vec(),
        DType::U64 => (value as u64).to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(value != 0.0)],
        DType::Small(small) => vec![small.encode(value as f32, true, PowerRounding::default())],
    }
}

impl Tensor {
    /// Creates a tensor from its little-endian bytes.
    ///
    /// # Errors
    /// Fails if the length of `data` does not match `dtype` and `dims`.
    pub fn new(dtype: DType, dims: Vec<usize>, data: Bytes) -> Result<Tensor, TensorError> {
        let expected = byte_length(dtype, &dims)?;
        if data.len() != expected {
            return Err(TensorError::WrongLength { dims, dtype, expected, found: data.len() });
        }
        Ok(Tensor { dtype, dims, data })
    }

    /// Creates a tensor of zeros.
    ///
    /// # Errors
    /// [`TensorError::TooLarge`] if the tensor cannot be addressed.
    pub fn zeros(dtype: DType, dims: Vec<usize>) -> Result<Tensor, TensorError> {
        let bytes = byte_length(dtype, &dims)?;
        Tensor::new(dtype, dims, Bytes::from(vec![0; bytes]))
    }

    /// Creates a tensor from plain elements with the layout of `dtype`: `half::f16` for [`DType::F16`], `u8` for
    /// [`DType::Bool`].
    ///
    /// # Panics
    /// Panics if the number of bytes does not match `dtype` and `dims`. This is a bug of the caller, not an error of
    /// its input.
    #[must_use]
    pub fn from_slice<T: Pod>(dtype: DType, dims: &[usize], elements: &[T]) -> Tensor {
        let data = Bytes::copy_from_slice(bytemuck::cast_slice(elements));
        Tensor::new(dtype, dims.to_vec(), data).expect("elements match dtype and dims")
    }

    /// Creates a float32 tensor.
    ///
    /// # Panics
    /// Panics if the number of elements is not the product of `dims`.
    #[must_use]
    pub fn f32(dims: &[usize], elements: &[f32]) -> Tensor {
        Tensor::from_slice(DType::F32, dims, elements)
    }

    /// Creates an int64 tensor.
    ///
    /// # Panics
    /// Panics if the number of elements is not the product of `dims`.
    #[must_use]
    pub fn i64(dims: &[usize], elements: &[i64]) -> Tensor {
        Tensor::from_slice(DType::I64, dims, elements)
    }

    /// Creates a scalar (rank 0) with `value` rounded to `dtype`.
    #[must_use]
    pub fn scalar(dtype: DType, value: f64) -> Tensor {
        Tensor::filled(dtype, &[], value)
    }

    /// Creates a tensor with all elements equal to `value`, rounded to `dtype`. For `bool`, every nonzero value becomes
    /// true.
    ///
    /// # Panics
    /// Panics if the tensor cannot be addressed.
    #[must_use]
    pub fn filled(dtype: DType, dims: &[usize], value: f64) -> Tensor {
        let bytes = byte_length(dtype, dims).expect("the caller's shape is addressable");
        let element = rounded(dtype, value);
        Tensor { dtype, dims: dims.to_vec(), data: element.repeat(bytes / dtype.size()).into() }
    }

    /// Creates a tensor from elements that are rounded to `dtype`. For `bool`, every nonzero value becomes true.
    ///
    /// # Panics
    /// Panics if the number of elements is not the product of `dims`.
    #[must_use]
    pub fn from_f64(dtype: DType, dims: Vec<usize>, elements: &[f64]) -> Tensor {
        let data: Vec<u8> = elements.iter().flat_map(|&value| rounded(dtype, value)).collect();
        Tensor::new(dtype, dims, data.into()).expect("the caller's elements fit its shape")
    }

    /// Converts the elements to `dtype`, each rounded. 64-bit integers are converted through `f64`.
    #[must_use]
    pub fn converted(&self, dtype: DType) -> Tensor {
        Tensor::from_f64(dtype, self.dims.clone(), &self.to_f64())
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.data.len() / self.dtype.size()
    }

    /// Returns true if the tensor has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Returns the little-endian bytes of the elements, in row-major order.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// Returns this tensor with its first byte at a multiple of `alignment`. A tensor that is not aligned is copied
    /// ([`aligned_copy`]).
    ///
    /// # Panics
    /// Panics if `alignment` is not a power of two.
    #[must_use]
    pub fn aligned(&self, alignment: usize) -> Tensor {
        if self.data.as_ptr().addr().is_multiple_of(alignment) {
            return self.clone();
        }
        Tensor { dtype: self.dtype, dims: self.dims.clone(), data: aligned_copy(&self.data, alignment) }
    }

    /// Returns the tensor as programs store it: bytes for a type without arithmetic ([`DType::stored`]).
    #[must_use]
    pub fn stored(&self) -> Tensor {
        Tensor { dtype: self.dtype.stored(), ..self.clone() }
    }

    /// Returns the elements as files store them: several elements of less than eight bits share a byte, the lowest bits
    /// first.
    #[must_use]
    pub fn packed_data(&self) -> Bytes {
        let DType::Small(small) = self.dtype else { return self.data.clone() };
        let bits = small.bits();
        if bits == 8 {
            return self.data.clone();
        }
        let byte = |codes: &[u8]| {
            let mask = ((1u16 << bits) - 1) as u8;
            codes.iter().enumerate().fold(0, |byte, (at, &code)| byte | (code & mask) << (at * bits))
        };
        self.data.chunks(8 / bits).map(byte).collect::<Vec<u8>>().into()
    }

    /// Creates a tensor from elements as files store them ([`Tensor::packed_data`]).
    ///
    /// # Errors
    /// Fails if the length of `data` does not match `dtype` and `dims`.
    pub fn from_packed(dtype: DType, dims: Vec<usize>, data: Bytes) -> Result<Tensor, TensorError> {
        let bits = match dtype {
            DType::Small(small) if small.bits() < 8 => small.bits(),
            _ => return Tensor::new(dtype, dims, data),
        };
        let count = byte_length(dtype, &dims)?;
        let expected = count.div_ceil(8 / bits);
        if data.len() != expected {
            return Err(TensorError::WrongLength { dims, dtype, expected, found: data.len() });
        }
        let mask = ((1u16 << bits) - 1) as u8;
        let code = |at: usize| data[at * bits / 8] >> (at * bits % 8) & mask;
        Tensor::new(dtype, dims, (0..count).map(code).collect::<Vec<u8>>().into())
    }

    /// Returns the same elements with another shape.
    ///
    /// # Errors
    /// Fails if the numbers of elements differ.
    pub fn reshaped(&self, dims: Vec<usize>) -> Result<Tensor, TensorError> {
        Tensor::new(self.dtype, dims, self.data.clone())
    }

    /// Returns the elements as `T`, which must have the layout of the element type.
    ///
    /// # Panics
    /// Panics if the sizes of `T` and of an element differ.
    #[must_use]
    pub fn to_vec<T: Pod>(&self) -> Vec<T> {
        assert_eq!(size_of::<T>(), self.dtype.size(), "the Rust type has the size of {}", self.dtype);
        bytemuck::pod_collect_to_vec(&self.data)
    }

    /// Converts every element of any type to `f64`. 64-bit integers are rounded.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.to_vec::<f32>().into_iter().map(f64::from).collect(),
            DType::F64 => self.to_vec::<f64>(),
            DType::F16 => self.to_vec::<half::f16>().into_iter().map(half::f16::to_f64).collect(),
            DType::BF16 => self.to_vec::<half::bf16>().into_iter().map(half::bf16::to_f64).collect(),
            DType::I8 => self.to_vec::<i8>().into_iter().map(f64::from).collect(),
            DType::I16 => self.to_vec::<i16>().into_iter().map(f64::from).collect(),
            DType::I32 => self.to_vec::<i32>().into_iter().map(f64::from).collect(),
            DType::I64 => self.to_vec::<i64>().into_iter().map(|v| v as f64).collect(),
            DType::U8 | DType::Bool => self.to_vec::<u8>().into_iter().map(f64::from).collect(),
            DType::U16 => self.to_vec::<u16>().into_iter().map(f64::from).collect(),
            DType::U32 => self.to_vec::<u32>().into_iter().map(f64::from).collect(),
            DType::U64 => self.to_vec::<u64>().into_iter().map(|v| v as f64).collect(),
            DType::Small(small) => self.data.iter().map(|&code| f64::from(small.decode(code))).collect(),
        }
    }

    /// Returns the index and the value of the first element that is infinite or NaN. The elements are converted in
    /// pieces, so that a large tensor is not copied.
    #[must_use]
    pub fn first_not_finite(&self) -> Option<(usize, f64)> {
        const PIECE: usize = 1 << 12;
        (0..self.len()).step_by(PIECE).find_map(|start| {
            let (len, size) = (PIECE.min(self.len() - start), self.dtype.size());
            let data = self.data.slice(start * size..(start + len) * size);
            let piece = Tensor { dtype: self.dtype, dims: vec![len], data }.to_f64();
            let at = piece.iter().position(|number| !number.is_finite())?;
            Some((start + at, piece[at]))
        })
    }

    /// Converts every element to `i64`, or returns `None` for a floating-point type. `uint64` values above `i64::MAX`
    /// wrap around.
    #[must_use]
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        Some(match self.dtype {
            DType::I8 => self.to_vec::<i8>().into_iter().map(i64::from).collect(),
            DType::I16 => self.to_vec::<i16>().into_iter().map(i64::from).collect(),
            DType::I32 => self.to_vec::<i32>().into_iter().map(i64::from).collect(),
            DType::I64 => self.to_vec::<i64>(),
            DType::U8 | DType::Bool => self.to_vec::<u8>().into_iter().map(i64::from).collect(),
            DType::U16 => self.to_vec::<u16>().into_iter().map(i64::from).collect(),
            DType::U32 => self.to_vec::<u32>().into_iter().map(i64::from).collect(),
            DType::U64 => self.to_vec::<u64>().into_iter().map(|v| v as i64).collect(),
            DType::Small(small) if small.integer_range().is_some() => {
                self.data.iter().map(|&code| small.decode(code) as i64).collect()
            }
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::Small(_) => return None,
        })
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.dims)?;
        if self.len() <= 8 {
            write!(f, " = {:?}", self.to_f64())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_checked() {
        let error = Tensor::new(DType::F32, vec![2, 3], Bytes::from(vec![0; 20])).unwrap_err();
        assert_eq!(error.to_string(), "a tensor of shape [2, 3] and type float32 needs 24 bytes but has 20");
    }

    #[test]
    fn first_not_finite_is_found_in_every_piece() {
        let mut elements = vec![1.0_f32; 10_000];
        assert_eq!(Tensor::f32(&[10_000], &elements).first_not_finite(), None);
        for at in [9_999, 4096, 4095, 0] {
            elements[at] = f32::NEG_INFINITY;
            let found = Tensor::f32(&[100, 100], &elements).first_not_finite();
            assert_eq!(found, Some((at, f64::NEG_INFINITY)));
        }
        assert_eq!(Tensor::i64(&[2], &[1, i64::MAX]).first_not_finite(), None);
    }

    #[test]
    fn unaligned_elements_are_copied() {
        let file = Bytes::from((0..=255).cycle().take(5000).collect::<Vec<u8>>());
        for (start, elements) in [(1, 40), (3, 1000), (8, 0)] {
            let data = file.slice(start..start + 4 * elements);
            let tensor = Tensor::new(DType::F32, vec![elements], data.clone()).expect("the length fits");
            let aligned = tensor.aligned(4096);
            assert_eq!(aligned, tensor);
            if elements > 0 {
                assert_eq!(aligned.data().as_ptr().addr() % 4096, 0);
                assert_ne!(data.as_ptr(), aligned.data().as_ptr());
            }
            // An aligned tensor is not copied again.
            assert_eq!(aligned.aligned(4096).data().as_ptr(), aligned.data().as_ptr());
        }
    }

    #[test]
    fn oversized_empty_tensors_are_rejected() {
        assert!(byte_length(DType::F32, &[1 << 40, 1 << 40]).is_err());
        assert!(byte_length(DType::F32, &[1 << 40, 1 << 40, 0]).is_err());
        assert_eq!(byte_length(DType::F64, &[3, 0]), Ok(0));
    }

    #[test]
    fn scalars_round_to_their_type() {
        assert_eq!(Tensor::scalar(DType::BF16, 1.0).to_f64(), [1.0]);
        assert_eq!(Tensor::scalar(DType::Bool, 2.0).to_f64(), [1.0]);
        assert_eq!(Tensor::scalar(DType::I8, -3.0).to_i64(), Some(vec![-3]));
    }
}
