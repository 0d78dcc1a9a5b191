//! What the crate uses of torch, looked up once.

use ebbtide_core::Element;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::dlpack::{Dims, DlType, Exchange};

/// Objects of torch, and the C table if there is one.
pub(crate) struct Torch {
    pub(crate) module: Py<PyModule>,
    pub(crate) tensor: Py<PyAny>,
    pub(crate) parameter: Py<PyAny>,
    pub(crate) uint8: Py<PyAny>,
    strided: Py<PyAny>,
    /// How many tensors and wrappers use a storage; private to torch, so it may be missing.
    use_count: Option<Py<PyAny>>,
    pub(crate) free_weak: Option<Py<PyAny>>,
    pub(crate) exchange: Option<Exchange>,
    /// Element types that survive the way through DLPack, where there is one.
    exact: Vec<(Py<PyAny>, Element)>,
    u8_dl: Option<DlType>,
    /// References of Python that a tensor has because C++ holds it, too.
    pub(crate) shared_references: isize,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Names of the element types that DLPack names one to one.
const EXACT: [&str; 20] = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
];

impl Torch {
    /// The one of this process.
    ///
    /// # Errors
    /// Torch can't be imported.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        if let Some(torch) = TORCH.get(py) {
            return Ok(torch);
        }
        let found = Self::find(py)?;
        let _ = TORCH.set(py, found);
        TORCH.get(py).ok_or_else(|| pyo3::exceptions::PySystemError::new_err("torch is not there"))
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        let module = py.import("torch")?;
        let native = module.getattr("_C")?;
        let tensor = module.getattr("Tensor")?;
        let storage = module.getattr("UntypedStorage")?;
        let exchange = Exchange::of(&tensor);
        let uint8 = module.getattr("uint8")?;
        let mut exact = Vec::new();
        for name in EXACT {
            // Older versions have fewer types.
            if let Ok(dtype) = module.getattr(name) {
                let bytes = dtype.getattr("itemsize")?.extract()?;
                exact.push((dtype.unbind(), Element { name, bytes }));
            }
        }
        let u8_dl = match &exchange {
            Some(exchange) => {
                let kwargs = pyo3::types::PyDict::new(py);
                kwargs.set_item("dtype", &uint8)?;
                let probe = module.call_method("empty", (1,), Some(&kwargs))?;
                exchange.look(&probe).map(|look| look.dtype)
            }
            None => None,
        };
        let shared_references = shared_references(&module)?;
        Ok(Self {
            parameter: module.getattr("nn")?.getattr("Parameter")?.unbind(),
            strided: module.getattr("strided")?.unbind(),
            use_count: native.getattr("_storage_Use_Count").ok().map(Bound::unbind),
            free_weak: storage.getattr("_free_weak_ref").ok().map(Bound::unbind),
            tensor: tensor.unbind(),
            uint8: uint8.unbind(),
            module: module.unbind(),
            exchange: exchange.filter(|_| u8_dl.is_some()),
            exact,
            u8_dl,
            shared_references,
        })
    }

    /// Whether it is a tensor and of no subclass.
    pub(crate) fn is_plain(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type().as_ptr() == self.tensor.as_ptr()
    }

    /// Whether it is a parameter or a view of one.
    pub(crate) fn is_parameter(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        if self.is_of_parameter_type(tensor)? {
            return Ok(true);
        }
        let base = tensor.getattr(intern!(py, "_base"))?;
        Ok(!base.is_none() && self.is_of_parameter_type(&base)?)
    }

    /// Asking a plain tensor whether it is an instance would run Python code.
    fn is_of_parameter_type(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let kind = tensor.get_type();
        if kind.as_ptr() == self.tensor.as_ptr() {
            return Ok(false);
        }
        let parameter = self.parameter.bind(tensor.py());
        Ok(kind.as_ptr() == parameter.as_ptr() || tensor.is_instance(parameter)?)
    }

    /// Name and size of an element type that survives DLPack.
    pub(crate) fn exact(&self, dtype: &Bound<'_, PyAny>) -> Option<Element> {
        let known = self.exact.iter().find(|(known, _)| known.as_ptr() == dtype.as_ptr());
        known.map(|(_, element)| *element)
    }

    /// How many tensors and Python wrappers use a storage, if torch tells.
    pub(crate) fn use_count(&self, py: Python<'_>, storage: usize) -> Option<u64> {
        let storage = storage.into_pyobject(py).ok()?;
        crate::call::function(self.use_count.as_ref()?.bind(py), &storage).ok()?.extract().ok()
    }

    /// Whether it is dense, on a real device, with memory of its own.
    pub(crate) fn is_dense(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let strided = tensor.getattr(intern!(py, "layout"))?.is(self.strided.bind(py));
        let flag = |name| -> PyResult<bool> { tensor.getattr(name)?.extract() };
        Ok(strided
            && !flag(intern!(py, "is_meta"))?
            && !flag(intern!(py, "is_nested"))?
            && !flag(intern!(py, "is_quantized"))?)
    }

    /// A tensor of `bytes` bytes on a device, of undefined content.
    pub(crate) fn bytes<'py>(
        &self,
        device: &Bound<'py, PyAny>,
        bytes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = device.py();
        let kwargs = pyo3::types::PyDict::new(py);
        kwargs.set_item(intern!(py, "dtype"), self.uint8.bind(py))?;
        kwargs.set_item(intern!(py, "device"), device)?;
        self.module.bind(py).call_method(intern!(py, "empty"), (bytes,), Some(&kwargs))
    }

    /// A tensor of a type that reaches into a storage.
    pub(crate) fn reach<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        offset: u64,
        dims: &Dims,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = storage.py();
        let kwargs = pyo3::types::PyDict::new(py);
        kwargs.set_item(intern!(py, "dtype"), dtype)?;
        kwargs.set_item(intern!(py, "device"), storage.getattr(intern!(py, "device"))?)?;
        let empty = self.module.bind(py).call_method(intern!(py, "empty"), (0,), Some(&kwargs))?;
        let sizes = PyTuple::new(py, dims.sizes())?;
        let strides = PyTuple::new(py, dims.strides())?;
        empty.call_method1(intern!(py, "set_"), (storage, offset, sizes, strides))
    }

    /// Type of bytes in DLPack's words.
    pub(crate) fn byte_type(&self) -> Option<DlType> {
        self.u8_dl
    }
}

/// How many references a tensor gets from having a view: one where C++ owns a share in the Python object while
/// it holds the tensor, none in older versions.
fn shared_references(module: &Bound<'_, PyModule>) -> PyResult<isize> {
    let tensor = module.call_method1("empty", (1,))?;
    let alone = crate::sole::references(&tensor);
    let view = tensor.call_method1("view", (1,))?;
    let shared = crate::sole::references(&tensor) - alone;
    drop(view);
    Ok(shared)
}

/// Address of the storage object of a tensor: its identity while something refers to it, weakly at
/// least.
pub(crate) fn storage_key(storage: &Bound<'_, PyAny>) -> PyResult<usize> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

/// The storage of a tensor.
pub(crate) fn storage_of<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.call_method0(intern!(tensor.py(), "untyped_storage"))
}

/// Torch's count of changes in place.
pub(crate) fn version_of(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}
