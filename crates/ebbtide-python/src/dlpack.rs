//! The C function table behind `torch.Tensor.__dlpack_c_exchange_api__`: what a tensor looks like, and a
//! tensor over memory of ours, each in one call.
//!
//! The structures are those of DLPack 1.x (<https://dmlc.github.io/dlpack>), whose layout is fixed for a
//! major version. Torch has the table since 2.10; without it everything goes through Python calls
//! (`view.rs`).
//!
//! # Unsafe
//!
//! * The table lives as long as the process: torch says so, and it is only taken from torch's own type.
//! * Functions of the table are called with the GIL held and a live tensor. Pointers to shape and
//!   strides are read before anything else runs that could change the tensor.
//! * A tensor that is handed out owns a [`Lease`], whose deleter torch calls once, on any thread.
#![expect(unsafe_code, reason = "a C interface")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::shelf::Memory;
use pyo3::prelude::*;

const NAME: &CStr = c"dlpack_exchange_api";

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    index: i32,
}

/// An element type as DLPack writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    version: Version,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    tensor: DlTensor,
}

type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
struct Table {
    version: Version,
    previous: *mut Table,
    allocate: Unused,
    from_object: Unused,
    to_object: Option<unsafe extern "C" fn(*mut Managed, *mut *mut c_void) -> c_int>,
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

const CPU: Device = Device { kind: 1, index: 0 };

/// The table, if the installed torch has one.
pub(crate) struct Exchange {
    table: NonNull<Table>,
}

// SAFETY: the table is constant and lives as long as the process.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// What a tensor in RAM looks like.
pub(crate) struct Look {
    /// Address of the first element.
    pub(crate) data: usize,
    pub(crate) dtype: DlType,
    pub(crate) dims: Dims,
}

/// Sizes, then strides, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dims(Box<[i64]>);

impl Dims {
    pub(crate) fn new(sizes: &[i64], strides: &[i64]) -> Self {
        Self(sizes.iter().chain(strides).copied().collect())
    }

    pub(crate) fn sizes(&self) -> &[i64] {
        &self.0[..self.0.len() / 2]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.0[self.0.len() / 2..]
    }
}

/// Keeps what a tensor of ours points at.
struct Lease {
    managed: Managed,
    dims: Dims,
    _buffer: Arc<Memory>,
}

impl Exchange {
    /// Takes the table from torch's tensor type. `None` if there is none, or one of another major
    /// version.
    pub(crate) fn of(tensor_type: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: any object may be passed; a wrong one makes it return null and set an error.
        let table = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
        let Some(table) = NonNull::new(table.cast::<Table>()) else {
            drop(PyErr::take(capsule.py()));
            return None;
        };
        // SAFETY: the header is the same in all versions.
        let fits = unsafe { table.as_ref().version.major } == 1;
        // SAFETY: version 1 has these fields.
        let complete = fits
            && unsafe { table.as_ref().to_object.is_some() && table.as_ref().describe.is_some() };
        complete.then_some(Self { table })
    }

    /// What a tensor looks like; `None` if it is not in RAM or of a kind that DLPack does not know.
    pub(crate) fn look(&self, tensor: &Bound<'_, PyAny>) -> Option<Look> {
        // SAFETY: `of` has checked that it is there.
        let describe = unsafe { self.table.as_ref().describe }?;
        let mut out = DlTensor {
            data: std::ptr::null_mut(),
            device: CPU,
            ndim: 0,
            dtype: DlType { code: 0, bits: 0, lanes: 0 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        // SAFETY: a live tensor of torch, with the GIL held; `out` outlives the call.
        if unsafe { describe(tensor.as_ptr().cast(), &raw mut out) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        if out.device.kind != CPU.kind || out.dtype.lanes != 1 {
            return None;
        }
        let ndim = usize::try_from(out.ndim).ok()?;
        // SAFETY: torch points at its own arrays of `ndim` numbers, which stay while the tensor is not
        // changed; nothing runs in between.
        let (sizes, strides) = unsafe { (numbers(out.shape, ndim), numbers(out.strides, ndim)) };
        let data = out.data.addr() + usize::try_from(out.byte_offset).ok()?;
        Some(Look { data, dtype: out.dtype, dims: Dims::new(sizes, strides) })
    }

    /// A tensor over `buffer` from byte `offset` on. Its memory goes back when the last tensor over it
    /// goes.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn tensor<'py>(
        &self,
        py: Python<'py>,
        (buffer, offset): (Arc<Memory>, usize),
        dtype: DlType,
        dims: &Dims,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: `of` has checked that it is there.
        let to_object = unsafe { self.table.as_ref().to_object };
        let to_object =
            to_object.ok_or_else(|| pyo3::exceptions::PySystemError::new_err("no DLPack"))?;
        let data = buffer.as_slice().as_ptr().wrapping_add(offset).cast_mut();
        let managed = Managed {
            version: Version { major: 1, minor: 0 },
            manager: std::ptr::null_mut(),
            deleter: Some(release),
            flags: 0,
            tensor: DlTensor {
                data: data.cast(),
                device: CPU,
                ndim: i32::try_from(dims.sizes().len())?,
                dtype,
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
        };
        let mut lease = Box::new(Lease { managed, dims: dims.clone(), _buffer: buffer });
        lease.managed.tensor.shape = lease.dims.sizes().as_ptr().cast_mut();
        lease.managed.tensor.strides = lease.dims.strides().as_ptr().cast_mut();
        let lease = Box::into_raw(lease);
        let mut object: *mut c_void = std::ptr::null_mut();
        // SAFETY: `managed` is the first field of the lease, which `release` frees; `object` outlives
        // the call. On an error torch has not taken it over, so it is freed here.
        unsafe {
            (*lease).managed.manager = lease.cast();
            if to_object(&raw mut (*lease).managed, &raw mut object) != 0 {
                drop(Box::from_raw(lease));
                return Err(PyErr::fetch(py));
            }
            Ok(Bound::from_owned_ptr(py, object.cast()))
        }
    }
}

/// # Safety
/// `pointer` is null or points at `count` numbers that live as long as `'a`.
unsafe fn numbers<'a>(pointer: *const i64, count: usize) -> &'a [i64] {
    if pointer.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(pointer, count) }
}

/// Called by torch when a tensor of ours goes, on any thread, with or without the GIL.
unsafe extern "C" fn release(managed: *mut Managed) {
    // SAFETY: `manager` is the lease that `tensor` has made, and torch calls this once.
    drop(unsafe { Box::from_raw((*managed).manager.cast::<Lease>()) });
}
