//! Taking the memory out of a Candle storage and putting it back.
//!
//! Candle's in-place operations give `&mut` access to a storage that any number of tensors share.
//! Exchanging the buffer there keeps every view attached to the same storage object, and needs no
//! `unsafe`.
//!
//! What is left behind is a *poison*: an empty buffer of a dtype that no kernel supports. Every
//! later read is then a clean error. An empty buffer of the same dtype would not do, since Candle's
//! kernels trust a layout that was valid once.

use std::cell::RefCell;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Shape, Storage, Tensor};

use ebbtide_core::{BackendError, Bytes, Device};

/// A detached handle on a tensor's storage: no graph behind it, and a layout that an in-place
/// operation accepts (no element twice).
pub(crate) fn handle(tensor: &Tensor) -> Result<Tensor> {
    let mut handle = tensor.detach();
    for dim in 0..handle.rank() {
        if handle.stride()[dim] == 0 && handle.dims()[dim] > 1 {
            handle = handle.narrow(dim, 0, 1)?;
        }
    }
    Ok(handle)
}

/// The same number for all tensors of one storage, while one of them lives.
pub(crate) fn storage_key(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

/// Number of elements of the whole storage, and bytes. `None` off the CPU.
pub(crate) fn storage_len(tensor: &Tensor) -> Option<(usize, u64)> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(cpu) = &*storage else { return None };
    let bytes = bytes_of(cpu)?.len();
    Some((bytes / tensor.dtype().size_in_bytes().max(1), bytes as u64))
}

struct Exchange(RefCell<CpuStorage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "ebbtide-exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut self.0.borrow_mut());
        Ok(())
    }
}

/// Puts `new` into the storage behind `handle` and returns what was there.
///
/// # Errors
/// The tensor is not on the CPU.
pub(crate) fn exchange(handle: &Tensor, new: CpuStorage) -> Result<CpuStorage> {
    let op = Exchange(RefCell::new(new));
    handle.inplace_op1(&op)?;
    Ok(op.0.into_inner())
}

/// Takes the memory out and leaves the poison.
pub(crate) fn take(handle: &Tensor) -> Result<CpuStorage> {
    exchange(handle, CpuStorage::F8E8M0(Vec::new()))
}

/// A tensor of this shape that tracks gradients and whose storage waits for its memory. Nothing may
/// read it before [`exchange`] has put the memory in.
pub(crate) fn empty_leaf(shape: &Shape, dtype: DType) -> Option<Tensor> {
    let storage = Storage::Cpu(zeros(dtype, 0)?);
    Some(Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), true))
}

/// Memory lent from one storage to another until the loan is dropped. While it runs, `from` is
/// poisoned.
pub(crate) struct Loan {
    from: Tensor,
    to: Tensor,
}

impl Loan {
    /// Both must be handles (see [`handle`]); what `to` held before is dropped.
    pub(crate) fn new(from: Tensor, to: Tensor) -> Result<Self> {
        let memory = take(&from)?;
        drop(exchange(&to, memory)?);
        Ok(Self { from, to })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let back = take(&self.to).and_then(|memory| exchange(&self.from, memory));
        // Both handles went through the same call when the loan began.
        assert!(back.is_ok() || std::thread::panicking(), "an exchange on the CPU can't fail");
    }
}

/// The CPU as a device: memory moves by changing its owner.
#[derive(Debug, Default)]
pub(crate) struct CandleCpu;

/// A storage the engine moves: a handle, and what [`Device::allocate`] needs to know.
#[derive(Debug)]
pub(crate) struct Held {
    handle: Tensor,
    dtype: DType,
    elements: usize,
}

impl Held {
    /// `None` if the storage is of a kind that can't be moved (it then stays on the device).
    pub(crate) fn new(handle: Tensor) -> Option<(Self, u64)> {
        let (elements, bytes) = storage_len(&handle)?;
        let dtype = handle.dtype();
        zeros(dtype, 0)?;
        Some((Self { handle, dtype, elements }, bytes))
    }
}

/// Memory without a storage.
#[derive(Debug)]
pub(crate) enum Block {
    Full(CpuStorage),
    /// To be filled: the memory is taken, and zeroed, by the tier's thread that fills it, so that the
    /// training thread does not spend time on it.
    Fresh(DType, usize),
}

impl Device for CandleCpu {
    type Storage = Held;
    type Block = Block;

    fn key(&self, storage: &Held) -> usize {
        storage_key(&storage.handle)
    }

    fn detach(&mut self, storage: &Held) -> std::result::Result<Block, BackendError> {
        take(&storage.handle).map(Block::Full).map_err(refused)
    }

    fn attach(&mut self, storage: &Held, block: Block) -> std::result::Result<(), BackendError> {
        let memory = match block {
            Block::Full(memory) => Some(memory),
            Block::Fresh(dtype, elements) => zeros(dtype, elements), // Nothing had to be filled in.
        };
        let memory = memory.ok_or_else(|| no_memory(storage.dtype))?;
        exchange(&storage.handle, memory).map(drop).map_err(refused)
    }

    fn allocate(&mut self, storage: &Held) -> std::result::Result<Block, BackendError> {
        // Checked here, so that `bytes_mut` can rely on it.
        zeros(storage.dtype, 0).ok_or_else(|| no_memory(storage.dtype))?;
        Ok(Block::Fresh(storage.dtype, storage.elements))
    }
}

fn no_memory(dtype: DType) -> BackendError {
    BackendError::new(format!("no memory of type {dtype:?}"))
}

fn refused(error: candle_core::Error) -> BackendError {
    BackendError::new("Candle refused an exchange of buffers").with_source(error)
}

/// Zeroed memory; large blocks come from the kernel as untouched pages.
fn zeros(dtype: DType, elements: usize) -> Option<CpuStorage> {
    Some(match dtype {
        DType::U8 => CpuStorage::U8(vec![0; elements]),
        DType::U32 => CpuStorage::U32(vec![0; elements]),
        DType::I16 => CpuStorage::I16(vec![0; elements]),
        DType::I32 => CpuStorage::I32(vec![0; elements]),
        DType::I64 => CpuStorage::I64(vec![0; elements]),
        DType::BF16 => CpuStorage::BF16(vec![half::bf16::ZERO; elements]),
        DType::F16 => CpuStorage::F16(vec![half::f16::ZERO; elements]),
        DType::F32 => CpuStorage::F32(vec![0.0; elements]),
        DType::F64 => CpuStorage::F64(vec![0.0; elements]),
        _ => return None,
    })
}

/// The bytes of a storage. `None` for the dtypes that are not moved (8 bits and less, and dummies).
pub(crate) fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
    Some(match storage {
        CpuStorage::U8(v) => v,
        CpuStorage::U32(v) => bytemuck::cast_slice(v),
        CpuStorage::I16(v) => bytemuck::cast_slice(v),
        CpuStorage::I32(v) => bytemuck::cast_slice(v),
        CpuStorage::I64(v) => bytemuck::cast_slice(v),
        CpuStorage::BF16(v) => bytemuck::cast_slice(v),
        CpuStorage::F16(v) => bytemuck::cast_slice(v),
        CpuStorage::F32(v) => bytemuck::cast_slice(v),
        CpuStorage::F64(v) => bytemuck::cast_slice(v),
        _ => return None,
    })
}

fn bytes_of_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
    Some(match storage {
        CpuStorage::U8(v) => v,
        CpuStorage::U32(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::I16(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::I32(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::I64(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::BF16(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::F16(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::F32(v) => bytemuck::cast_slice_mut(v),
        CpuStorage::F64(v) => bytemuck::cast_slice_mut(v),
        _ => return None,
    })
}

impl Bytes for Block {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Full(memory) => bytes_of(memory).unwrap_or_default(),
            Self::Fresh(..) => &[],
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if let Self::Fresh(dtype, elements) = *self
            && let Some(memory) = zeros(dtype, elements)
        {
            *self = Self::Full(memory);
        }
        match self {
            Self::Full(memory) => bytes_of_mut(memory).unwrap_or_default(),
            Self::Fresh(..) => &mut [],
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Full(_) => self.bytes().len(),
            Self::Fresh(dtype, elements) => dtype.size_in_bytes() * elements,
        }
    }
}
