//! `kvtier metrics` for several stores, and over HTTP.

mod http;
mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Outcome;
use super::stores::{Source, ask_all, list};
use http::{Answer, Request};
use page::{Format, Page};

/// Where metrics are served, unless the command line says otherwise.
pub const USUAL_ADDRESS: &str = "127.0.0.1:9479";

/// Prints the metrics of all stores, each with a label.
pub fn print(sources: Vec<Source>, timeout: Duration) {
    print!("{}", Exporter::new(sources, timeout).page(Format::Prometheus));
}

/// Serves the metrics of all stores until the process ends.
pub fn serve(address: &str, sources: Vec<Source>, timeout: Duration) -> Outcome<()> {
    let listener = bind(address)?;
    let place = listener.local_addr()?;
    super::exit_on_signals()?;
    let exporter = Exporter::new(sources, timeout);
    eprintln!("kvtier: serving metrics at http://{place}/metrics");
    http::serve(&listener, move |request| exporter.answer(request));
    Ok(())
}

/// Binds `[ADDRESS:]PORT`; without an address, that of this machine alone.
fn bind(address: &str) -> Outcome<TcpListener> {
    let all: Vec<SocketAddr> = match address.parse::<u16>() {
        Ok(port) => vec![SocketAddr::from(([127, 0, 0, 1], port))],
        Err(_) => address
            .to_socket_addrs()
            .map_err(|error| {
                format!("'{address}' is no address ({error}): use PORT or ADDRESS:PORT, such as {USUAL_ADDRESS}")
            })?
            .collect(),
    };
    let bound = TcpListener::bind(&all[..]);
    Ok(bound.map_err(|error| format!("cannot listen at {address}: {error}"))?)
}

struct Exporter {
    sources: Vec<Source>,
    timeout: Duration,
    /// The last scrape, and why each store was down in it.
    last: Mutex<Scrape>,
}

#[derive(Default)]
struct Scrape {
    ended: Option<Instant>,
    page: Page,
    down: BTreeMap<String, String>,
    /// What is wrong with the sources.
    faults: BTreeSet<String>,
}

impl Exporter {
    fn new(sources: Vec<Source>, timeout: Duration) -> Exporter {
        Exporter { sources, timeout, last: Mutex::default() }
    }

    fn answer(&self, request: &Request) -> Answer {
        match request.path.as_str() {
            "/metrics" => {
                let is_open = request.accept.contains("application/openmetrics-text");
                let format = if is_open { Format::OpenMetrics } else { Format::Prometheus };
                Answer { status: 200, media_type: format.media_type(), body: self.page(format) }
            }
            "/healthz" => Answer::text(200, "ok"),
            _ => Answer::text(404, "unknown path: use /metrics or /healthz"),
        }
    }

    /// The metrics of all stores. One scrape runs at a time, however many clients ask: those that
    /// waited for it get its result.
    fn page(&self, format: Format) -> String {
        let asked = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.ended.is_none_or(|ended| ended < asked) {
            *last = self.scrape(&last);
        }
        last.page.render(format)
    }

    fn scrape(&self, last: &Scrape) -> Scrape {
        const HELP: &str = "1 = the control socket of the store answers.";
        let mut faults = last.faults.clone();
        let stores = list(&self.sources, &mut faults);
        let answers = ask_all(&stores, |_| "metrics".into(), self.timeout);
        let (mut page, mut down) = (Page::default(), BTreeMap::new());
        for (store, answer) in stores.iter().zip(answers) {
            let name = &store.name;
            let added = answer
                .map_err(|refusal| refusal.to_string())
                .and_then(|text| page.add(name, &text));
            page.gauge("kvtier_up", HELP, name, f64::from(u8::from(added.is_ok())));
            // Each change of the reason is reported once.
            match (added.err(), last.down.get(name)) {
                (Some(words), before) => {
                    if before != Some(&words) {
                        eprintln!("kvtier: store {name} is down: {words}");
                    }
                    down.insert(name.clone(), words);
                }
                (None, Some(_)) => eprintln!("kvtier: store {name} is up again"),
                (None, None) => {}
            }
        }
        Scrape { ended: Some(Instant::now()), page, down, faults }
    }
}
