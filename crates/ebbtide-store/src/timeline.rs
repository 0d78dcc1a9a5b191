//! When what ran: the picture of a run for Chrome's and Perfetto's trace viewers.
//!
//! It is here because the tiers measure when a copy ran, against a clock whose zero is the picture's
//! ([`Timeline::origin`], [`FileConfig::origin`](crate::FileConfig::origin)), and because all front ends
//! draw the same one. The engine has no clock, and draws nothing.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// So many spans are kept, and so many values of counters; later ones are only counted. A picture of
/// that size takes some 100 MB, and no viewer shows more.
const MOST: usize = 1_000_000;

/// A row of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The thread that trains.
    Compute,
    /// What that thread waited for.
    Wait,
    /// Copies out of the device, by worker of the tier.
    Out(u32),
    /// Copies into the device, by worker of the tier.
    In(u32),
}

impl Row {
    fn id(self) -> u32 {
        match self {
            Self::Compute => 0,
            Self::Wait => 1,
            Self::Out(worker) => 10 + worker,
            Self::In(worker) => 100 + worker,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Compute => "compute".into(),
            Self::Wait => "waits".into(),
            Self::Out(worker) => format!("offload {worker}"),
            Self::In(worker) => format!("load {worker}"),
        }
    }
}

#[derive(Debug)]
struct Span {
    row: Row,
    name: String,
    start_ns: u64,
    end_ns: u64,
}

/// Remembers when what ran. A cheap handle: clones write to the same picture.
///
/// ```
/// use ebbtide_store::{Row, Timeline};
///
/// let timeline = Timeline::new();
/// let started = std::time::Instant::now();
/// // … forward of a layer …
/// timeline.span(Row::Compute, "h.0 forward".into(), started);
/// timeline.counter("device bytes", 1 << 20);
/// let mut json = Vec::new();
/// assert_eq!(timeline.write(&mut json)?, 2);
/// assert!(String::from_utf8(json)?.contains("device bytes"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Timeline {
    origin: Instant,
    books: Arc<Mutex<Books>>,
}

#[derive(Debug, Default)]
struct Books {
    /// In the order in which they ended.
    spans: Vec<Span>,
    /// Name, time, value.
    counters: Vec<(&'static str, u64, u64)>,
    /// From the end of a copy (row, time) to the end of the wait for it.
    arrows: Vec<((Row, u64), u64)>,
    last_copy: Option<(Row, u64)>,
    /// Spans and values that came when there were enough.
    left_out: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new()
    }
}

impl Timeline {
    /// An empty picture whose time begins now.
    pub fn new() -> Self {
        Self { origin: Instant::now(), books: Arc::default() }
    }

    /// Zero of all times in the picture.
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// The value that a quantity has from now on. Drawn as a curve.
    pub fn counter(&self, name: &'static str, value: u64) {
        let now = self.now();
        let mut books = self.lock();
        if books.counters.len() < MOST {
            books.counters.push((name, now, value));
        } else {
            books.left_out += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        // Only ever locked for one push or read; a panic can't leave it half done.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.since_origin(Instant::now())
    }

    fn since_origin(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.origin).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Something that began at `started` and ends now.
    pub fn span(&self, row: Row, name: String, started: Instant) {
        let (start_ns, end_ns) = (self.since_origin(started), self.now());
        self.lock().add(Span { row, name, start_ns, end_ns });
    }

    /// A copy, with the times that the tier measured.
    pub fn copy(&self, row: Row, name: String, start_ns: u64, end_ns: u64) {
        let mut books = self.lock();
        books.add(Span { row, name, start_ns, end_ns });
        if books.last_copy.is_none_or(|(_, end)| end < end_ns) {
            books.last_copy = Some((row, end_ns));
        }
    }

    /// A wait that began at `started` and ends now. If a copy ended meanwhile, an arrow leads from
    /// the last one to here.
    pub fn wait(&self, name: &str, started: Instant) {
        let (start_ns, end_ns) = (self.since_origin(started), self.now());
        let mut books = self.lock();
        books.add(Span { row: Row::Wait, name: name.to_string(), start_ns, end_ns });
        let ended = |(_, end): &mut (Row, u64)| *end >= start_ns && *end <= end_ns;
        if let Some(copy) = books.last_copy.take_if(ended)
            && books.left_out == 0
        {
            books.arrows.push((copy, end_ns));
        }
    }

    /// Writes everything so far as JSON for the trace viewers of Chrome and Perfetto: a row for the
    /// training thread, one for its waits, one for each worker and direction of the tier; arrows
    /// lead from a copy to the wait that it ended. Times are in microseconds. Returns how many spans and
    /// values of counters there are.
    ///
    /// # Errors
    /// The writer fails.
    pub fn write(&self, mut out: impl Write) -> io::Result<usize> {
        let books = self.lock();
        books.write_rows(&mut out)?;
        books.write_spans(&mut out)?;
        for (name, time, value) in &books.counters {
            let time = micros(*time);
            write!(
                out,
                ",\n{{\"ph\":\"C\",\"pid\":1,\"ts\":{time},\"name\":\"{name}\",\
                 \"args\":{{\"bytes\":{value}}}}}"
            )?;
        }
        books.write_arrows(&mut out)?;
        writeln!(out, "\n]")?;
        Ok(books.spans.len() + books.counters.len())
    }
}

impl Books {
    fn add(&mut self, span: Span) {
        if self.spans.len() < MOST {
            self.spans.push(span);
        } else {
            self.left_out += 1;
        }
    }

    fn write_rows(&self, out: &mut impl Write) -> io::Result<()> {
        let mut rows: Vec<Row> = Vec::new();
        for span in &self.spans {
            if !rows.contains(&span.row) {
                rows.push(span.row);
            }
        }
        rows.sort_by_key(|row| row.id());
        writeln!(out, "[")?;
        let title = match self.left_out {
            0 => "ebbtide".to_string(),
            more => format!("ebbtide, without {more} later events"),
        };
        write!(out, r#"{{"ph":"M","pid":1,"name":"process_name","args":{{"name":"{title}"}}}}"#)?;
        for row in rows {
            let (id, name) = (row.id(), row.name());
            write!(
                out,
                ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{id},\"name\":\"thread_name\",\
                 \"args\":{{\"name\":\"{name}\"}}}}"
            )?;
        }
        Ok(())
    }

    fn write_spans(&self, out: &mut impl Write) -> io::Result<()> {
        for span in &self.spans {
            let (id, name) = (span.row.id(), escape(&span.name));
            let (start, length) = (micros(span.start_ns), micros(span.end_ns - span.start_ns));
            write!(
                out,
                ",\n{{\"ph\":\"X\",\"pid\":1,\"tid\":{id},\"ts\":{start},\"dur\":{length},\
                 \"name\":\"{name}\"}}"
            )?;
        }
        Ok(())
    }

    fn write_arrows(&self, out: &mut impl Write) -> io::Result<()> {
        for (number, ((row, from), to)) in self.arrows.iter().enumerate() {
            // An arrow belongs to the span that its ends lie in, so they lie just inside.
            for (phase, id, time) in [("s", row.id(), *from), ("f", Row::Wait.id(), *to)] {
                let time = micros(time.saturating_sub(1));
                write!(
                    out,
                    ",\n{{\"ph\":\"{phase}\",\"bp\":\"e\",\"pid\":1,\"tid\":{id},\"ts\":{time},\
                     \"id\":{number},\"cat\":\"wait\",\"name\":\"wait\"}}"
                )?;
            }
        }
        Ok(())
    }
}

fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// Names are a user's: quotes and control characters must not end the JSON string.
fn escape(text: &str) -> String {
    let one = |c: char| match c {
        '"' | '\\' => format!("\\{c}"),
        c if u32::from(c) < 0x20 => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    text.chars().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(timeline: &Timeline) -> String {
        let mut json = Vec::new();
        let _ = timeline.write(&mut json).unwrap();
        String::from_utf8(json).unwrap()
    }

    #[test]
    fn rows_spans_counters_and_the_arrow_of_a_wait() {
        let timeline = Timeline::new();
        let started = timeline.origin();
        timeline.span(Row::Compute, "h.0 \"forward\"\n".into(), started);
        timeline.copy(Row::Out(1), "h.0".into(), 1_000, 2_500);
        timeline.copy(Row::In(0), "h.0".into(), 3_000, 4_001);
        timeline.counter("live bytes", 12);
        // The copies that are made up above have to be over when the wait for them ends.
        while started.elapsed().as_micros() < 5 {
            std::hint::spin_loop();
        }
        timeline.wait("load h.0", started);
        let json = written(&timeline);
        for row in ["compute", "waits", "offload 1", "load 0"] {
            assert!(json.contains(&format!(r#""args":{{"name":"{row}"}}"#)), "{row}: {json}");
        }
        assert!(json.contains(r#""name":"h.0 \"forward\"\u000a""#), "{json}");
        assert!(json.contains(r#""tid":11,"ts":1.000,"dur":1.500,"name":"h.0""#), "{json}");
        assert!(json.contains(r#""args":{"bytes":12}"#), "{json}");
        // From inside of the copy that ended last.
        assert!(json.contains(r#""ph":"s","bp":"e","pid":1,"tid":100,"ts":4.000"#), "{json}");
        assert_eq!(json.matches(r#""ph":"f""#).count(), 1, "{json}");
        assert_eq!(timeline.write(io::sink()).unwrap(), 5);
    }

    /// A wait that no copy ended has no arrow, and neither has a second wait for the same copy.
    #[test]
    fn a_copy_has_one_arrow() {
        let timeline = Timeline::new();
        timeline.wait("nothing", timeline.origin());
        timeline.copy(Row::In(0), "h.0".into(), 1, 2);
        timeline.wait("load", timeline.origin());
        timeline.wait("load", timeline.origin());
        assert_eq!(written(&timeline).matches(r#""ph":"s""#).count(), 1);
    }

    #[test]
    fn a_long_run_keeps_its_beginning() {
        let timeline = Timeline::new();
        for _ in 0..MOST + 3 {
            timeline.counter("live bytes", 1);
        }
        assert_eq!(timeline.write(io::sink()).unwrap(), MOST);
        assert!(written(&timeline).contains("ebbtide, without 3 later events"));
    }
}
