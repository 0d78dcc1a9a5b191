//! When what ran: the picture of a run for Chrome's and Perfetto's trace viewers.

use std::io::{self, Write};
use std::time::Instant;

/// A row of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Row {
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

/// Spans in the order in which they ended.
#[derive(Debug)]
pub(crate) struct Timeline {
    origin: Instant,
    spans: Vec<Span>,
    /// From the end of a copy (row, time) to the end of the wait for it.
    arrows: Vec<((Row, u64), u64)>,
    last_copy: Option<(Row, u64)>,
}

impl Timeline {
    pub(crate) fn new(origin: Instant) -> Self {
        Self { origin, spans: Vec::new(), arrows: Vec::new(), last_copy: None }
    }

    fn since_origin(&self, time: Instant) -> u64 {
        u64::try_from(time.duration_since(self.origin).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Something that began at `started` and ends now.
    pub(crate) fn span(&mut self, row: Row, name: String, started: Instant) {
        let (start_ns, end_ns) = (self.since_origin(started), self.since_origin(Instant::now()));
        self.spans.push(Span { row, name, start_ns, end_ns });
    }

    /// A copy, with the times that the tier measured.
    pub(crate) fn copy(&mut self, row: Row, name: String, start_ns: u64, end_ns: u64) {
        self.spans.push(Span { row, name, start_ns, end_ns });
        if self.last_copy.is_none_or(|(_, end)| end < end_ns) {
            self.last_copy = Some((row, end_ns));
        }
    }

    /// A wait that began at `started` and ends now. If a copy ended meanwhile, an arrow leads from
    /// the last one to here.
    pub(crate) fn wait(&mut self, name: &str, started: Instant) {
        let start_ns = self.since_origin(started);
        self.span(Row::Wait, name.to_string(), started);
        let end_ns = self.since_origin(Instant::now());
        if let Some(copy) = self.last_copy.take_if(|(_, end)| *end >= start_ns && *end <= end_ns) {
            self.arrows.push((copy, end_ns));
        }
    }

    /// Writes everything as a JSON array of trace events, times in microseconds.
    pub(crate) fn write(&self, mut out: impl Write) -> io::Result<()> {
        let mut rows: Vec<Row> = Vec::new();
        for span in &self.spans {
            if !rows.contains(&span.row) {
                rows.push(span.row);
            }
        }
        rows.sort_by_key(|row| row.id());
        writeln!(out, "[")?;
        write!(out, r#"{{"ph":"M","pid":1,"name":"process_name","args":{{"name":"ebbtide"}}}}"#)?;
        for row in rows {
            let (id, name) = (row.id(), row.name());
            write!(
                out,
                ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{id},\"name\":\"thread_name\",\
                 \"args\":{{\"name\":\"{name}\"}}}}"
            )?;
        }
        for span in &self.spans {
            let (id, name) = (span.row.id(), escape(&span.name));
            let (start, length) = (micros(span.start_ns), micros(span.end_ns - span.start_ns));
            write!(
                out,
                ",\n{{\"ph\":\"X\",\"pid\":1,\"tid\":{id},\"ts\":{start},\"dur\":{length},\
                 \"name\":\"{name}\"}}"
            )?;
        }
        for (number, ((row, from), to)) in self.arrows.iter().enumerate() {
            for (phase, id, time) in [("s", row.id(), *from), ("f", Row::Wait.id(), *to)] {
                let time = micros(time);
                write!(
                    out,
                    ",\n{{\"ph\":\"{phase}\",\"bp\":\"e\",\"pid\":1,\"tid\":{id},\"ts\":{time},\
                     \"id\":{number},\"cat\":\"wait\",\"name\":\"wait\"}}"
                )?;
            }
        }
        writeln!(out, "\n]")
    }
}

fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            c if (c as u32) < 0x20 => escaped.push_str(&format!("\\u{:04x}", c as u32)),
            c => escaped.push(c),
        }
    }
    escaped
}
