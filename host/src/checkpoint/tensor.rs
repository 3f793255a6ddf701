//! Tensors as checkpoints see them: a name, a logical shape and owned elements.

/// A whole tensor in logical order, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct LogicalTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub data: TensorData,
}

/// Elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl TensorData {
    pub fn len(&self) -> usize {
        match self {
            TensorData::F32(data) => data.len(),
            TensorData::F64(data) => data.len(),
        }
    }

    /// Whether every number is one.
    pub fn is_finite(&self) -> bool {
        match self {
            TensorData::F32(v) => v.iter().all(|x| x.is_finite()),
            TensorData::F64(v) => v.iter().all(|x| x.is_finite()),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// safetensors' name of the element type.
    pub fn dtype(&self) -> &'static str {
        match self {
            TensorData::F32(_) => "F32",
            TensorData::F64(_) => "F64",
        }
    }

    /// The elements as f64; exact.
    pub fn into_f64(self) -> Vec<f64> {
        match self {
            TensorData::F32(data) => data.into_iter().map(f64::from).collect(),
            TensorData::F64(data) => data,
        }
    }

    /// The elements as f32; rounds f64 to nearest.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            TensorData::F32(data) => data,
            TensorData::F64(data) => data.into_iter().map(|x| x as f32).collect(),
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            TensorData::F32(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::F64(data) => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// From little-endian bytes, if `dtype` is known.
    pub(super) fn from_bytes(dtype: &str, bytes: &[u8]) -> Option<TensorData> {
        match dtype {
            "F32" => Some(TensorData::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())),
            "F64" => Some(TensorData::F64(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect())),
            _ => None,
        }
    }
}
