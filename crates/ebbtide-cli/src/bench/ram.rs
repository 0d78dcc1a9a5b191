//! RAM as an accelerator. Each copy runs when the next one is queued, whose memory is being fetched
//! meanwhile, and at the latest when its end is marked; so there is nothing to wait for. The device's
//! allocator keeps freed blocks for the next storage of the same size, as those of frameworks do.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use ebbtide_core::{Accelerator, BackendError, Direction, End, Facts};
use ebbtide_store::{AlignedBuf, prefetch, prefetch_to_write};

/// Blocks begin at a multiple of this, as in the frameworks' allocators.
const ALIGN: usize = 64;

pub(crate) struct Ram {
    /// Host buffers, by number. They live as long as the device.
    hosts: Vec<AlignedBuf>,
    arena: AlignedBuf,
    /// Not yet run.
    queued: Option<Piece>,
    /// Where the first aligned byte is, and the first that was never given out.
    next: usize,
    /// Offsets of free blocks, by size. The one that was freed first is used first, so that storages
    /// which come and go together stay in order, as with an allocator that goes by address.
    free: HashMap<u64, VecDeque<usize>>,
}

/// A storage: where its bytes are, and how many; `None` while it is away.
pub(crate) type RamStorage = Rc<Cell<Option<(usize, u64)>>>;

impl Ram {
    /// Memory for so many bytes.
    ///
    /// # Errors
    /// There is not so much.
    pub(crate) fn new(bytes: usize) -> Result<Self, BackendError> {
        let arena = AlignedBuf::zeroed(bytes)?;
        let (hosts, free) = (Vec::new(), HashMap::new());
        Ok(Self { hosts, arena, queued: None, next: 0, free })
    }

    /// A storage with undefined content.
    ///
    /// # Errors
    /// The arena is full.
    pub(crate) fn storage(&mut self, bytes: u64) -> Result<RamStorage, BackendError> {
        let offset = self.allocate(bytes)?;
        Ok(Rc::new(Cell::new(Some((offset, bytes)))))
    }

    fn allocate(&mut self, bytes: u64) -> Result<usize, BackendError> {
        if let Some(offset) = self.free.get_mut(&bytes).and_then(VecDeque::pop_front) {
            return Ok(offset);
        }
        let (offset, length) = (self.next, usize::try_from(bytes).unwrap_or(usize::MAX));
        let end = offset.checked_add(length).filter(|end| *end <= self.arena.len());
        let end = end.ok_or_else(|| BackendError::new("the device is out of memory"))?;
        self.next = end.next_multiple_of(ALIGN);
        Ok(offset)
    }
}

/// A copy between the arena and a host buffer.
#[derive(Clone, Copy)]
struct Piece {
    out: bool,
    arena: usize,
    host: usize,
    host_at: usize,
    bytes: usize,
}

impl Ram {
    /// The bytes of the host buffer, and those of the arena.
    fn ends(&mut self, piece: Piece) -> Option<(&mut [u8], &mut [u8])> {
        let host = self.hosts.get_mut(piece.host)?.as_mut_slice();
        let arena = self.arena.as_mut_slice();
        let host = host.get_mut(piece.host_at..piece.host_at + piece.bytes)?;
        Some((host, arena.get_mut(piece.arena..piece.arena + piece.bytes)?))
    }

    /// Runs the copy that was queued last.
    fn flush(&mut self) -> Result<(), BackendError> {
        let Some(piece) = self.queued.take() else { return Ok(()) };
        let (host, arena) = self.ends(piece).ok_or_else(does_not_fit)?;
        let (from, to) = if piece.out { (arena, host) } else { (host, arena) };
        to.copy_from_slice(from);
        Ok(())
    }

    /// Queues a copy, asks for its memory, and runs the one before it meanwhile.
    fn queue(&mut self, piece: Piece) -> Result<(), BackendError> {
        let (host, arena) = self.ends(piece).ok_or_else(does_not_fit)?;
        if piece.out {
            prefetch(arena);
            prefetch_to_write(host);
        } else {
            prefetch(host);
            prefetch_to_write(arena);
        }
        self.flush()?;
        self.queued = Some(piece);
        Ok(())
    }
}

fn does_not_fit() -> BackendError {
    BackendError::new("a copy that does not fit its ends")
}

impl Accelerator for Ram {
    type Storage = RamStorage;
    /// Never made: the device gathers.
    type Block = std::convert::Infallible;
    /// Its number.
    type Host = usize;
    type Stream = ();
    type Event = ();

    fn key(&self, storage: &RamStorage) -> usize {
        Rc::as_ptr(storage).addr()
    }

    fn facts(&self, storage: &RamStorage) -> Option<Facts> {
        Some(Facts { bytes: storage.get().map_or(0, |(_, bytes)| bytes), version: 0 })
    }

    fn compute(&self) {}

    fn copy_stream(&mut self, _: Direction) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&mut self, (): ()) -> Result<(), BackendError> {
        self.flush()
    }

    fn wait(&mut self, (): (), (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn is_done(&mut self, (): &()) -> bool {
        true
    }

    fn sync(&mut self, (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn sync_stream(&mut self, (): ()) -> Result<(), BackendError> {
        self.flush()
    }

    fn free(&mut self, storage: &mut RamStorage) -> Result<(), BackendError> {
        if let Some((offset, bytes)) = storage.take() {
            self.free.entry(bytes).or_default().push_back(offset);
        }
        Ok(())
    }

    fn restore(&mut self, storage: &mut RamStorage, bytes: u64) -> Result<(), BackendError> {
        storage.set(Some((self.allocate(bytes)?, bytes)));
        Ok(())
    }

    fn stage(&mut self, bytes: u64) -> Result<Self::Block, BackendError> {
        Err(BackendError::new(format!("no staging of {bytes} bytes where RAM is the device")))
    }

    fn pin(&mut self, bytes: u64) -> Result<Self::Host, BackendError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.hosts.push(AlignedBuf::zeroed(bytes)?);
        Ok(self.hosts.len() - 1)
    }

    fn copy(
        &mut self,
        (): (),
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError> {
        let place = |storage: &RamStorage| storage.get().map(|(offset, _)| offset);
        let (out, storage, at, host, host_at) = match (from, to) {
            (End::Storage(storage, at), End::Host(host, host_at)) => {
                (true, storage, at, *host, host_at)
            }
            (End::Host(host, host_at), End::Storage(storage, at)) => {
                (false, storage, at, *host, host_at)
            }
            _ => return Err(does_not_fit()),
        };
        let number = |value: u64| usize::try_from(value).map_err(|_| does_not_fit());
        let arena = place(storage).ok_or_else(does_not_fit)? + number(at)?;
        let (host_at, bytes) = (number(host_at)?, number(bytes)?);
        self.queue(Piece { out, arena, host, host_at, bytes })
    }

    fn gathers(&self) -> bool {
        true
    }
}
