//! What the engine knows a storage by: the tensors that keep it alive, or what is left of it.
//!
//! # Three kinds
//!
//! * A *span*: some addresses of a storage that autograd saved tensors of. Detached aliases keep the
//!   storage alive until its bytes are copied; then they are dropped, and the memory goes when its last
//!   owner goes. Nothing is ever taken from under a user. What comes back is memory of its own.
//! * *In place*: a storage that was named by hand. It is resized to zero and restored, so that every
//!   tensor of it is attached to the memory again.
//! * *Outside*: a storage of another framework, which an object of Python looks after: see
//!   [`outside`](crate::outside).
//!
//! # Access contract
//!
//! | content of a span | memory | who leaves it |
//! | --- | --- | --- |
//! | `Device` | the aliases' | [`Held::let_go`], when the copy is complete |
//! | `Away` | none | [`Held::come_home`], when the load is complete |
//! | `Ram`, `Torch` | its own | nobody: it goes with the last handle |
//! | `Gone` | none | nobody: its step was given up |
//!
//! A span whose tensor was changed before its copy was complete travels on, but every read is an error: the
//! copy may be torn. So is a read of one that came back and was changed through a tensor handed out before: the
//! span keeps what it handed out, of which autograd therefore makes no gradient in place, either. A span grows only while its group is open, under the hub's lock. Contents change under the hub's lock
//! and with the GIL; the lock in here is for readers that have only the GIL, and is never held while
//! Python runs.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ebbtide_core::{BackendError, Element, Facts, PoolId};
use pyo3::intern;
use pyo3::prelude::*;

use crate::graveyard::Graveyard;
use crate::outside::Outside;
use crate::shelf::{Awaited, Memory};
use crate::torch::{Torch, storage_key, storage_of, version_of};
use crate::view::{ALIGN, Place, View};

/// One storage, or a span of it, as the engine knows it.
pub(crate) struct Held {
    kind: Kind,
    /// Where the storage is.
    pub(crate) place: Place,
    /// Address of torch's storage object.
    pub(crate) key: usize,
    /// Sizes of the first tensor that was saved of it, for messages.
    sizes: Box<[i64]>,
    /// Type of its elements.
    pub(crate) element: Element,
    /// It is to be swapped whether or not it is marked by name.
    pub(crate) wanted: AtomicBool,
    /// It may share a host buffer with others.
    pub(crate) packed: AtomicBool,
    /// The pool that a span's copy goes to, if not the engine's own.
    pub(crate) pool: OnceLock<PoolId>,
    /// Its group was given up while it was away: it has no bytes any more.
    pub(crate) lost: Arc<AtomicBool>,
    graveyard: Arc<Graveyard>,
}

enum Kind {
    Span(Mutex<Span>),
    InPlace(InPlace),
    Outside(Outside),
}

struct Span {
    range: Range<usize>,
    /// The version whose bytes these are.
    version: u64,
    /// A later version was met when the copy was complete: it may be torn.
    changed: Option<Versions>,
    content: Content,
    /// A weak reference, so that the storage object's address is not used again.
    weak: Option<usize>,
    /// While it is away, if what it comes home to is from a shelf.
    awaited: Option<Awaited>,
    /// Tensors over the memory that it came home to. Each counts its changes by itself.
    shown: Vec<Shown>,
}

/// Of a tensor that was changed: what its version was, and what it is.
type Versions = (u64, u64);

/// What was handed out for the alias of a number.
struct Shown {
    number: usize,
    /// The bytes that it reaches, by the addresses of the saved tensor.
    reach: Range<usize>,
    tensor: Py<PyAny>,
    version: u64,
}

/// A storage that is emptied and restored.
pub(crate) struct InPlace {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) storage: Py<PyAny>,
    /// What the tensor was when it was registered.
    pub(crate) facts: Facts,
}

/// A tensor that shares memory and version with a saved one, and its version when it was saved.
struct Alias {
    tensor: Py<PyAny>,
    version: u64,
}

enum Content {
    Device(Vec<Alias>),
    Away,
    /// From this byte of the buffer on.
    Ram(Arc<Memory>, usize),
    /// A tensor of bytes.
    Torch(Py<PyAny>),
    Gone,
}

/// Where a span's bytes are, for who wants to read them.
pub(crate) enum Found {
    /// A tensor that still shares the memory.
    Alias(Py<PyAny>),
    Away,
    Ram(Arc<Memory>, usize),
    Torch(Py<PyAny>),
    Changed {
        was: u64,
        now: u64,
    },
    Gone,
}

/// What became of the memory when the aliases went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Yes,
    /// Something else still refers to the storage.
    StillUsed,
}

impl Held {
    /// A span that begins as what one tensor reaches.
    pub(crate) fn span(
        (place, key): (Place, usize),
        view: &View,
        (alias, version): (Py<PyAny>, u64),
        graveyard: Arc<Graveyard>,
    ) -> Self {
        let content = Content::Device(vec![Alias { tensor: alias, version }]);
        let kind = Kind::Span(Mutex::new(Span {
            range: view.reach(),
            version,
            changed: None,
            content,
            weak: None,
            awaited: None,
            shown: Vec::new(),
        }));
        let (sizes, element) = (view.sizes().into(), view.element());
        Self {
            kind,
            place,
            key,
            sizes,
            element,
            wanted: AtomicBool::new(false),
            packed: AtomicBool::new(true),
            pool: OnceLock::new(),
            lost: Arc::default(),
            graveyard,
        }
    }

    /// A storage named by hand.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn in_place(
        tensor: &Bound<'_, PyAny>,
        (view, place): (&View, Place),
        facts: Option<Facts>,
        graveyard: Arc<Graveyard>,
    ) -> PyResult<Self> {
        let storage = storage_of(tensor)?;
        let key = storage_key(&storage)?;
        let facts = match facts {
            Some(facts) => facts,
            None => Facts { bytes: nbytes(&storage)?, version: version_of(tensor)? },
        };
        let kind = InPlace { tensor: tensor.clone().unbind(), storage: storage.unbind(), facts };
        let (sizes, element) = (view.sizes().into(), view.element());
        Ok(Self {
            kind: Kind::InPlace(kind),
            place,
            key,
            sizes,
            element,
            wanted: AtomicBool::new(true),
            packed: AtomicBool::new(true),
            pool: OnceLock::new(),
            lost: Arc::default(),
            graveyard,
        })
    }

    fn lock(&self) -> Option<MutexGuard<'_, Span>> {
        match &self.kind {
            Kind::Span(span) => Some(span.lock().unwrap_or_else(PoisonError::into_inner)),
            Kind::InPlace(_) | Kind::Outside(_) => None,
        }
    }

    /// A storage that an object of Python looks after.
    pub(crate) fn outside(outside: Outside, key: usize, graveyard: Arc<Graveyard>) -> Self {
        Self {
            kind: Kind::Outside(outside),
            place: Place::Outside,
            key,
            sizes: Box::default(),
            element: Element { name: "bytes", bytes: 1 },
            wanted: AtomicBool::new(true),
            packed: AtomicBool::new(false),
            pool: OnceLock::new(),
            lost: Arc::default(),
            graveyard,
        }
    }

    /// The object that looks after it, if one does.
    pub(crate) fn keeper(&self) -> Option<&Outside> {
        match &self.kind {
            Kind::Outside(outside) => Some(outside),
            _ => None,
        }
    }

    /// What belongs to a storage named by hand.
    pub(crate) fn named(&self) -> Option<&InPlace> {
        match &self.kind {
            Kind::InPlace(named) => Some(named),
            Kind::Span(_) | Kind::Outside(_) => None,
        }
    }

    /// What errors call it: the name of whoever saved it, and its sizes.
    pub(crate) fn label(&self, name: &str) -> String {
        format!("{name} {:?}", self.sizes)
    }

    /// What the engine tells storages apart by: a span is a storage of its own.
    pub(crate) fn engine_key(self: &Arc<Self>) -> usize {
        match &self.kind {
            Kind::Span(_) => Arc::as_ptr(self).addr(),
            Kind::InPlace(_) | Kind::Outside(_) => self.key,
        }
    }

    /// The addresses of a span; those of the whole storage in place, which are not known here.
    pub(crate) fn range(&self) -> Range<usize> {
        self.lock().map_or(0..0, |span| span.range.clone())
    }

    /// Takes another tensor of the same storage and version in, if the span has its bytes already or may
    /// grow by them. Returns the alias's number. Only for a span whose copy has not been started: writes
    /// that torch does not count may have come since.
    pub(crate) fn join(
        &self,
        reach: &Range<usize>,
        version: u64,
        alias: impl FnOnce() -> PyResult<Py<PyAny>>,
    ) -> PyResult<Option<usize>> {
        let Some(mut span) = self.lock() else { return Ok(None) };
        let has = span.range.start <= reach.start && reach.end <= span.range.end;
        let hull = span.range.start.min(reach.start)..span.range.end.max(reach.end);
        // A hull with large gaps would move bytes that nobody saved.
        let dense = hull.len() <= 2 * (span.range.len() + reach.len());
        if span.version != version {
            return Ok(None);
        }
        match &mut span.content {
            Content::Device(aliases) if has || dense => {
                aliases.push(Alias { tensor: alias()?, version });
                let number = aliases.len() - 1;
                if !has {
                    span.range = hull;
                }
                Ok(Some(number))
            }
            _ => Ok(None),
        }
    }

    /// Where the bytes are; `number` is the alias's.
    pub(crate) fn find(&self, py: Python<'_>, number: usize) -> Found {
        let Some(span) = self.lock() else { return Found::Gone };
        if let Some((was, now)) = span.changed {
            return Found::Changed { was, now };
        }
        match &span.content {
            Content::Device(aliases) => match aliases.get(number) {
                Some(alias) => Found::Alias(alias.tensor.clone_ref(py)),
                None => Found::Gone,
            },
            Content::Away => Found::Away,
            Content::Ram(buffer, at) => Found::Ram(Arc::clone(buffer), *at),
            Content::Torch(bytes) => Found::Torch(bytes.clone_ref(py)),
            Content::Gone => Found::Gone,
        }
    }

    /// What was handed out for an alias, which reaches these bytes, since the span came home. `Err` with the
    /// versions if a tensor over some of them was changed since it was handed out.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn shown(
        &self,
        py: Python<'_>,
        number: usize,
        reach: &Range<usize>,
    ) -> PyResult<Result<Option<Py<PyAny>>, Versions>> {
        let Some(span) = self.lock() else { return Ok(Ok(None)) };
        let mut found = None;
        let meets = |other: &Range<usize>| reach.start < other.end && other.start < reach.end;
        for shown in span.shown.iter().filter(|shown| meets(&shown.reach)) {
            let now = version_of(shown.tensor.bind(py))?;
            if now != shown.version {
                return Ok(Err((shown.version, now)));
            }
            if shown.number == number {
                found = Some(shown.tensor.clone_ref(py));
            }
        }
        Ok(Ok(found))
    }

    /// A tensor over the memory that the span came home to is handed out for an alias.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn show(
        &self,
        number: usize,
        reach: Range<usize>,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let version = version_of(tensor)?;
        if let Some(mut span) = self.lock() {
            span.shown.push(Shown { number, reach, tensor: tensor.clone().unbind(), version });
        }
        Ok(())
    }

    /// A tensor that shares a span's memory, while one does.
    pub(crate) fn alias(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match &self.lock()?.content {
            Content::Device(aliases) => Some(aliases.first()?.tensor.clone_ref(py)),
            _ => None,
        }
    }

    /// The copy of a span is complete: drops the aliases. If the tensor was changed meanwhile the copy
    /// may be torn, and every later read is an error.
    ///
    /// # Errors
    /// Torch refuses; nothing has changed.
    pub(crate) fn let_go(&self, py: Python<'_>) -> PyResult<Freed> {
        let torch = Torch::get(py)?;
        let Some(mut span) = self.lock() else { return Ok(Freed::Yes) };
        let Content::Device(aliases) = &span.content else { return Ok(Freed::Yes) };
        let mut changed = None;
        for alias in aliases {
            let (was, now) = (alias.version, version_of(alias.tensor.bind(py))?);
            if was != now {
                changed = Some((was, now));
            }
        }
        let count = aliases.len() as u64;
        let storage = storage_of(aliases[0].tensor.bind(py))?;
        let weak: usize = storage.call_method0(intern!(py, "_weak_ref"))?.extract()?;
        // The wrapper that is asked counts as well.
        let others = torch.use_count(py, self.key).is_some_and(|uses| uses > count + 1);
        span.weak = Some(weak);
        span.changed = changed;
        let aliases = std::mem::replace(&mut span.content, Content::Away);
        // Whatever runs when they go, it finds this unlocked.
        drop(span);
        drop((aliases, storage));
        Ok(if others { Freed::StillUsed } else { Freed::Yes })
    }

    /// A span that was let go of has a claim to memory, until its content is another.
    pub(crate) fn is_awaited(&self, awaited: Awaited) {
        if let Some(mut span) = self.lock()
            && matches!(span.content, Content::Away)
        {
            span.awaited = Some(awaited);
        }
    }

    /// The bytes of a span are in a buffer of its own.
    pub(crate) fn come_home(&self, buffer: Arc<Memory>, at: usize) {
        self.set(Content::Ram(buffer, at));
    }

    /// The bytes of a span are, or will be, in a tensor of bytes.
    pub(crate) fn come_home_as(&self, bytes: Py<PyAny>) {
        self.set(Content::Torch(bytes));
    }

    /// The memory that was given for a load goes again.
    pub(crate) fn leave_again(&self) {
        self.set(Content::Away);
    }

    /// The bytes are not to be had any more. What is still on the device stays readable.
    pub(crate) fn give_up(&self, py: Python<'_>) {
        if let Some(named) = self.named() {
            let now = nbytes(named.storage.bind(py));
            self.lost.store(now.is_ok_and(|now| now < named.facts.bytes), Ordering::Relaxed);
            return;
        }
        let away = self.lock().is_some_and(|span| matches!(span.content, Content::Away));
        if away {
            self.set(Content::Gone);
        }
    }

    fn set(&self, content: Content) {
        let Some(mut span) = self.lock() else { return };
        let old = (std::mem::replace(&mut span.content, content), span.awaited.take());
        drop(span);
        drop(old);
    }

    /// Where the first byte of a span is in RAM; `None` while it is away.
    pub(crate) fn address(&self) -> Option<usize> {
        let span = self.lock()?;
        match &span.content {
            Content::Device(_) => Some(span.range.start),
            Content::Ram(buffer, at) => Some(buffer.as_slice().as_ptr().expose_provenance() + at),
            _ => None,
        }
    }

    /// Whether a span still has the memory in which its tensors were saved.
    pub(crate) fn is_as_saved(&self) -> bool {
        self.lock().is_some_and(|span| matches!(span.content, Content::Device(_)))
    }

    /// The tensor of bytes that a load has given a span.
    pub(crate) fn torch_bytes(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match &self.lock()?.content {
            Content::Torch(bytes) => Some(bytes.clone_ref(py)),
            _ => None,
        }
    }

    /// Whether memory of the device is in use for it.
    pub(crate) fn on_device(&self) -> bool {
        self.lock().is_none_or(|span| {
            matches!(span.content, Content::Device(_) | Content::Ram(..) | Content::Torch(_))
        })
    }

    /// What the engine compares (row T5). A span compares versions itself, when its copy is complete and
    /// when it is read.
    pub(crate) fn facts(&self) -> Option<Facts> {
        if let Some(outside) = self.keeper() {
            return outside.facts();
        }
        let named = self.named()?;
        Python::attach(|py| {
            let bytes = nbytes(named.storage.bind(py)).ok()?;
            Some(Facts { bytes, version: version_of(named.tensor.bind(py)).ok()? })
        })
    }

    /// Empties a storage named by hand.
    ///
    /// # Errors
    /// Torch refuses; it is as it was.
    pub(crate) fn empty(&self, py: Python<'_>) -> PyResult<()> {
        self.resize(py, 0)
    }

    /// Gives a storage named by hand, or a span that is away, memory again.
    ///
    /// # Errors
    /// Out of memory; it is as it was.
    pub(crate) fn resize(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let Some(named) = self.named() else { return Ok(()) };
        let storage = named.storage.bind(py);
        if nbytes(storage)? == bytes {
            return Ok(());
        }
        let bytes = bytes.into_pyobject(py)?;
        crate::call::method(storage, intern!(py, "resize_"), &bytes).map(drop)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let weak = self.lock().and_then(|mut span| span.weak.take());
        self.graveyard.forgotten(self.key, weak);
    }
}

/// Distance of an address from the last aligned one: kernels may work differently on other ones.
pub(crate) fn phase(address: usize) -> usize {
    address % ALIGN
}

/// Size of a storage in bytes.
pub(crate) fn nbytes(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.call_method0(intern!(storage.py(), "nbytes"))?.extract()
}

/// What Python says, as the engine passes it on.
pub(crate) fn backend_error(py: Python<'_>, what: &str, error: &PyErr) -> BackendError {
    let memory = error.is_instance_of::<pyo3::exceptions::PyMemoryError>(py)
        || error.get_type(py).name().is_ok_and(|name| name == "OutOfMemoryError");
    let cause = BackendError::new(error.to_string());
    let error = BackendError::new(what).with_source(cause);
    if memory { error.no_room() } else { error }
}
