//! `kvtier stream plan`: plans from the headers of a model.

use kvtier::base::clock::Clock;
use kvtier::base::json_out::Json;
use kvtier::base::machine::MemoryFacts;
use kvtier::io::model_files::measure::measure;
use kvtier::io::model_files::real::{ModelFilesOpts, RealModelFiles};
use kvtier::stream::model::Model;
use kvtier::stream::plan::{ComputeLocation, Inputs, Links, Memory, Plan, PlanOptions};

use super::sizes::{bytes, rate};
use super::{Files, Outcome, Place, print};

/// Bytes read to measure the disk.
const MEASURED_BYTES: u64 = 256 << 20;

/// The inputs of a plan.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: Files,
    /// Host memory for weights, such as 8G; by default that of this machine, less a reserve
    #[arg(long, value_parser = bytes)]
    host: Option<u64>,
    /// Free memory of a device, such as 24G; by default the processor computes
    #[arg(long, value_parser = bytes)]
    device: Option<u64>,
    /// Bandwidth from host memory to the device in bytes a second, such as 13G
    #[arg(long, value_parser = rate, requires = "device")]
    device_link: Option<u64>,
    /// Bandwidth of the disk in bytes a second, such as 3.3G
    #[arg(long, value_parser = rate)]
    disk: Option<u64>,
    /// Measure the disk
    #[arg(long, conflicts_with = "disk")]
    measure: bool,
    /// Tokens of KV to reserve memory for; 0 = the context of the model, at most 4096
    #[arg(long, default_value_t = 0)]
    context: u32,
    /// Slots of the ring; 0 = 2
    #[arg(long, default_value_t = 0)]
    slots: u32,
    /// Choice of resident units
    #[arg(long, value_enum, default_value = "interleaved")]
    placement: Place,
    /// Keep slots even if everything fits, so that memory can be released later
    #[arg(long)]
    shrinks: bool,
    /// Units have fixed addresses on the device; each takes whole pieces of 2 MiB
    #[arg(long, requires = "device")]
    in_place: bool,
    /// Also forecast a pass over other links, such as h2d=13,disk=3.3 (GB/s)
    #[arg(long, value_name = "LINKS")]
    what_if: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            compute: Some(if self.device.is_some() {
                ComputeLocation::Device
            } else {
                ComputeLocation::Host
            }),
            placement: self.placement.into(),
            host_ceiling_bytes: self.host,
            // All of a given size may be used.
            host_reserve_bytes: self.host.map(|_| 0),
            context: self.context,
            slots: self.slots,
            shrinks: self.shrinks,
            // The mapping granularity of all CUDA devices.
            device_granularity_bytes: if self.in_place { 2 << 20 } else { 0 },
            ..PlanOptions::default()
        }
    }

    /// The memory of this machine, or of the sizes on the command line.
    fn memory(&self) -> Memory {
        let facts = MemoryFacts::probe();
        let memory = Memory {
            device_free_bytes: self.device.unwrap_or(0),
            host_free_bytes: facts.effective_bytes(),
            host_total_bytes: facts.usable_bytes(),
            host_is_limited: facts.is_limited(),
            lockable_bytes: facts.lockable_bytes(),
        };
        match self.host {
            None => memory,
            Some(host) => Memory {
                host_free_bytes: host,
                host_total_bytes: host,
                host_is_limited: false,
                lockable_bytes: u64::MAX,
                ..memory
            },
        }
    }

    fn links(&self, model: &Model) -> Outcome<Links> {
        let mut disk = self.disk.unwrap_or(0);
        if self.measure {
            let paths: Vec<_> = model.files.iter().map(|file| file.path.clone()).collect();
            let files = RealModelFiles::open(&paths, &ModelFilesOpts::default())?;
            disk = measure(&files, &Clock::real(), MEASURED_BYTES)?;
        }
        Ok(Links { disk, device: self.device_link.unwrap_or(0), processor: 0 })
    }
}

/// Prints a plan.
pub fn run(args: &Args) -> Outcome<()> {
    let (model, units) = args.files.open()?;
    let plan_options = args.plan_options();
    let inputs = Inputs {
        units: &units,
        facts: &model.facts,
        memory: args.memory(),
        links: args.links(&model)?,
        plan_options: &plan_options,
    };
    let plan = Plan::make(&inputs)?;
    let other = args.what_if.as_deref().map(Links::parse).transpose()?;
    let other = other.map(|links| plan.what_if(&inputs, links)).transpose()?;
    if args.json {
        let mut json: serde_json::Value = serde_json::from_str(&plan.json(&inputs))?;
        if let Some(forecast) = other {
            let mut text = Json::default();
            forecast.json(&mut text);
            json["what_if"] = serde_json::from_str(&text.into_text())?;
        }
        return print(&format!("{json}\n"));
    }
    let mut text = plan.text(&inputs);
    if let (Some(forecast), Some(links)) = (other, &args.what_if) {
        text += &format!("\nover {links}:\n{}", forecast.text(plan.compute));
    }
    print(&text)
}
