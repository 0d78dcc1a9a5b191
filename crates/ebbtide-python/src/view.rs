//! How a tensor lies in the bytes that are saved for it, and how it is made again.

use std::sync::Arc;

use ebbtide_core::Element;
use pyo3::intern;
use pyo3::prelude::*;

use crate::dlpack::{Dims, DlType};
use crate::shelf::Memory;
use crate::torch::Torch;

/// A tensor without its bytes.
#[derive(Debug)]
pub(crate) struct View {
    /// Address of the first element while the tensor was packed.
    pub(crate) data: usize,
    dims: Dims,
    dtype: Py<PyAny>,
    /// Set if the type survives DLPack.
    exchange: Option<DlType>,
    element: Element,
    conjugate: bool,
    negative: bool,
}

/// Where a tensor lives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// Memory of the CPU.
    Ram,
    /// An accelerator, by torch's name and number.
    Accelerator(String, u32),
    /// Memory of the CPU, of a storage that an object of Python looks after.
    Outside,
}

/// Alignment that torch's allocators promise and some kernels' results depend on.
pub(crate) const ALIGN: usize = 64;

impl View {
    /// Looks at a tensor. `None` for what can't be moved: sparse, nested, quantized, without memory.
    ///
    /// # Errors
    /// Torch refuses something that every tensor has.
    pub(crate) fn of(torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(Self, Place)>> {
        let dtype = tensor.getattr(intern!(tensor.py(), "dtype"))?;
        if let (Some(exchange), Some(element)) = (&torch.exchange, torch.exact(&dtype))
            && let Some(look) = exchange.look(tensor)
        {
            let view = Self {
                data: look.data,
                dims: look.dims,
                dtype: dtype.unbind(),
                exchange: Some(look.dtype),
                element,
                conjugate: false,
                negative: false,
            };
            return Ok(Some((view.with_bits(tensor)?, Place::Ram)));
        }
        Self::of_any(torch, tensor, &dtype)
    }

    /// The same by Python calls, for other devices, types and versions of torch.
    fn of_any(
        torch: &Torch,
        tensor: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Self, Place)>> {
        let py = tensor.py();
        if !torch.is_dense(tensor)? {
            return Ok(None);
        }
        // Wrappers of function transforms have no memory.
        let Ok(data) = tensor.call_method0(intern!(py, "data_ptr")) else { return Ok(None) };
        let sizes: Vec<i64> = tensor.call_method0(intern!(py, "size"))?.extract()?;
        let strides: Vec<i64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let device = tensor.getattr(intern!(py, "device"))?;
        let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
        let place = if kind == "cpu" {
            Place::Ram
        } else {
            let index: Option<u32> = device.getattr(intern!(py, "index"))?.extract()?;
            Place::Accelerator(kind, index.unwrap_or(0))
        };
        let view = Self {
            data: data.extract()?,
            dims: Dims::new(&sizes, &strides),
            element: element(torch, dtype)?,
            dtype: dtype.clone().unbind(),
            exchange: None,
            conjugate: false,
            negative: false,
        };
        Ok(Some((view.with_bits(tensor)?, place)))
    }

    /// Bytes mean something else in a lazily conjugated or negated tensor; only some types can be.
    fn with_bits(mut self, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let flag = |name| -> PyResult<bool> { tensor.call_method0(name)?.extract() };
        if self.element.bytes >= 2 {
            self.negative = flag(intern!(py, "is_neg"))?;
            self.conjugate = flag(intern!(py, "is_conj"))?;
        }
        Ok(self)
    }

    /// The addresses that it reaches; empty for a tensor without elements.
    pub(crate) fn reach(&self) -> std::ops::Range<usize> {
        let mut last = 0;
        for (&size, &stride) in self.dims.sizes().iter().zip(self.dims.strides()) {
            if size == 0 {
                return self.data..self.data;
            }
            last += (size - 1) * stride;
        }
        let last = usize::try_from(last).unwrap_or(0) * self.element.bytes as usize;
        self.data..self.data + last + self.element.bytes as usize
    }

    /// Whether its elements lie one after the other, in order.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        let dims = self.dims.sizes().iter().zip(self.dims.strides()).rev();
        for (&size, &stride) in dims {
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// Bytes of its elements, each counted once however often it is shown.
    pub(crate) fn bytes(&self) -> u64 {
        let sizes = self.dims.sizes().iter().zip(self.dims.strides());
        let shown = sizes.filter(|(_, stride)| **stride != 0).map(|(&size, _)| size.unsigned_abs());
        shown.product::<u64>() * u64::from(self.element.bytes)
    }

    /// Its sizes, for messages.
    pub(crate) fn sizes(&self) -> &[i64] {
        self.dims.sizes()
    }

    /// Type and size of an element, as far as DLPack knows it.
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// The tensor again, over a buffer whose byte `at` is the tensor's first.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn over_buffer<'py>(
        &self,
        py: Python<'py>,
        torch: &Torch,
        buffer: &Arc<Memory>,
        at: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let (Some(exchange), Some(dtype)) = (&torch.exchange, self.exchange) {
            let tensor = exchange.tensor(py, (Arc::clone(buffer), at), dtype, &self.dims)?;
            return self.put_bits(tensor);
        }
        let reach = self.reach().len();
        let bytes = bytes_over(py, torch, buffer, at, reach)?;
        let storage = crate::torch::storage_of(&bytes)?;
        self.put_bits(torch.reach(&storage, self.dtype.bind(py), 0, &self.dims)?)
    }

    /// The tensor again, in a storage whose byte `at` is the tensor's first.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn in_storage<'py>(
        &self,
        torch: &Torch,
        storage: &Bound<'py, PyAny>,
        at: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let offset = at / u64::from(self.element.bytes.max(1));
        let dtype = self.dtype.bind(storage.py());
        self.put_bits(torch.reach(storage, dtype, offset, &self.dims)?)
    }

    fn put_bits<'py>(&self, tensor: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let tensor =
            if self.conjugate { tensor.call_method0(intern!(py, "conj"))? } else { tensor };
        if self.negative { tensor.call_method0(intern!(py, "_neg_view")) } else { Ok(tensor) }
    }
}

/// Name and size of an element type; only the size of one that is seldom used.
fn element(torch: &Torch, dtype: &Bound<'_, PyAny>) -> PyResult<Element> {
    if let Some(element) = torch.exact(dtype) {
        return Ok(element);
    }
    let bytes = dtype.getattr(intern!(dtype.py(), "itemsize"))?.extract()?;
    Ok(Element { name: "another type", bytes })
}

/// A tensor of bytes over a part of a buffer.
fn bytes_over<'py>(
    py: Python<'py>,
    torch: &Torch,
    buffer: &Arc<Memory>,
    at: usize,
    len: usize,
) -> PyResult<Bound<'py, PyAny>> {
    if let (Some(exchange), Some(bytes)) = (&torch.exchange, torch.byte_type()) {
        let dims = Dims::new(&[i64::try_from(len)?], &[1]);
        return exchange.tensor(py, (Arc::clone(buffer), at), bytes, &dims);
    }
    let address = buffer.as_slice().as_ptr().addr() + at;
    let owner = Py::new(py, Owner { _buffer: Arc::clone(buffer) })?;
    py.import("ebbtide.torch._buffer")?.call_method1("over", (address, len, owner))
}

/// Keeps a buffer for a tensor that was made without DLPack.
#[pyclass(frozen, module = "ebbtide._native")]
struct Owner {
    _buffer: Arc<Memory>,
}
