// Instances and their devices: a map of the memory of each device by layer, and the homes of its layers.

const STRIP = 12, GAP = 3, MAP = 46, BAR = 7;
// Parts of a layer from bottom to top, and parts of a whole device from left to right.
const LAYER_PARTS = ["attention and norms", "FFN", "KV cache in use", "KV cache kept", "KV cache free", "sampling", "padding"];
const DEVICE_PARTS = ["embedding and head", ...LAYER_PARTS, "temporaries (reserved)", "unused"];
const COLORS = {
  "embedding and head": "--embedding",
  "attention and norms": "--attention",
  "FFN": "--ffn",
  "KV cache in use": "--kv-used",
  "KV cache kept": "--kv-kept",
  "KV cache free": "--kv-free",
  "sampling": "--sampling",
  "padding": "--padding",
  "temporaries (reserved)": "--temporaries",
  "unused": "--empty",
};

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function degreeName(degree) {
  return `--degree-${Math.log2(degree) % 7}`;
}

export function formatBytes(size) {
  let value = size;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(value) < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(2)} GiB`;
}

export function span(devices) {
  const last = devices[devices.length - 1];
  return devices[0] === last ? `${last}` : `${devices[0]}–${last}`;
}

function home([start, degree]) {
  return `TP${degree}[${degree === 1 ? start : `${start}–${start + degree - 1}`}]`;
}

// Return for each device the instances that have layers there: [{instance, layers}], the device's own instance first.
// layers[i] = {attention, ffn}, each a list of homes, or undefined if the device does not compute it.
function hosted(state) {
  const devices = state.devices.map(() => []);
  for (const instance of state.instances) {
    const found = new Map();
    for (const run of instance.runs) {
      for (const each of run.homes) {
        for (let device = each[0]; device < each[0] + each[1]; device += 1) {
          if (!found.has(device)) found.set(device, Array.from({ length: state.num_layers }, () => ({})));
          for (let layer = run.layers[0]; layer < run.layers[1]; layer += 1) {
            const modules = found.get(device)[layer];
            if (run.module !== "ffn") modules.attention = { here: each, all: run.homes };
            if (run.module !== "attention") modules.ffn = { here: each, all: run.homes };
          }
        }
      }
    }
    for (const [device, layers] of found) {
      const item = { instance, layers, own: instance.devices.includes(device) };
      if (item.own) devices[device].unshift(item);
      else devices[device].push(item);
    }
  }
  return devices;
}

// Bytes of a layer by part. KV pages in use and kept are spread over the layers in proportion to their KV cache.
function layerParts(device, sizes, cache) {
  const [, attention = 0, ffn = 0, kv = 0, sampling = 0, padding = 0] = sizes;
  const used = cache ? (device.kv_used_bytes * kv) / cache : 0;
  const kept = cache ? (device.kv_kept_bytes * kv) / cache : 0;
  return [attention, ffn, used, kept, Math.max(kv - used - kept, 0), sampling, padding];
}

function deviceParts(device, layers) {
  const sums = LAYER_PARTS.map((_, part) => layers.reduce((sum, parts) => sum + parts[part], 0));
  sums[5] += device.outside[4] ?? 0;
  sums[6] += device.outside[5] ?? 0;
  const unused = Math.max(device.budget_bytes - device.live_bytes - device.reserved_bytes, 0);
  return [device.outside[0] ?? 0, ...sums, device.reserved_bytes, unused];
}

class Device {
  constructor(number, readout) {
    this.root = element("div", "", "device");
    const label = element("div");
    label.append(element("span", `device ${number}`));
    this.guests = label.appendChild(element("span", "", "guests"));
    this.canvas = element("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    const size = element("div", "", "size");
    this.live = size.appendChild(element("data"));
    this.budget = size.appendChild(element("span", "", "dim"));
    this.root.append(label, this.canvas, size);
    this.root.dataset.device = number;
    this.number = number;
    this.layer = null;
    this.readout = readout;
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.point(Math.floor(((event.clientX - box.left) / box.width) * this.numLayers));
    });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -this.numLayers, End: this.numLayers }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.point(Math.min(Math.max((this.layer ?? (step > 0 ? -1 : this.numLayers)) + step, 0), this.numLayers - 1));
    });
  }

  update(device, hosts, numLayers, largest) {
    this.device = device;
    this.hosts = hosts;
    this.numLayers = numLayers;
    this.largest = largest;
    const cache = device.layers.reduce((sum, sizes) => sum + (sizes[3] ?? 0), 0);
    this.layers = Array.from({ length: numLayers }, (_, layer) => layerParts(device, device.layers[layer] ?? [], cache));
    this.parts = deviceParts(device, this.layers);
    this.live.value = device.live_bytes;
    this.live.textContent = formatBytes(device.live_bytes);
    this.budget.textContent = ` of ${formatBytes(device.budget_bytes)}`;
    this.guests.textContent = hosts.filter((host) => !host.own).map((host) => `+ layers of instance ${host.instance.id}`).join(", ");
    const shares = DEVICE_PARTS.map((name, part) => [name, this.parts[part]]).filter(([, size]) => size > 0);
    this.canvas.setAttribute(
      "aria-label",
      `Memory of device ${this.number}: ${shares.map(([name, size]) => `${name} ${formatBytes(Math.round(size))}`).join(", ")}`,
    );
    this.draw();
    if (this.layer !== null) this.describe();
  }

  point(layer) {
    if (layer === this.layer || (layer !== null && !(layer >= 0 && layer < this.numLayers))) return;
    this.layer = layer;
    this.draw();
    this.describe();
  }

  describe() {
    if (this.layer === null) {
      this.readout(null);
      return;
    }
    const homes = this.hosts.map(({ instance, layers, own }) => {
      const { attention, ffn } = layers[this.layer];
      const texts = [];
      const name = (module) => module.all.map(home).join(", ");
      if (attention && ffn && name(attention) === name(ffn)) texts.push(name(attention));
      else {
        if (attention) texts.push(`attention ${name(attention)}`);
        if (ffn) texts.push(`FFN ${name(ffn)}`);
      }
      const where = texts.length ? texts.join(", ") : "on other devices";
      return own ? where : `of instance ${instance.id}: ${where}`;
    });
    const sizes = LAYER_PARTS.map((name, part) => [name, Math.round(this.layers[this.layer][part])])
      .filter(([, size]) => size > 0)
      .map(([name, size]) => `${name} ${formatBytes(size)}`);
    this.readout(`device ${this.number}, layer ${this.layer}: ${[...homes, ...sizes].join("; ") || "nothing"}`);
  }

  draw() {
    const strips = Math.max(this.hosts.length, 1);
    const height = strips * (STRIP + 1) + GAP + MAP + GAP + BAR;
    const { context, width } = prepare(this.canvas, height);
    if (!width) return;
    const edge = (layer) => Math.round((layer * width) / this.numLayers);
    const gap = width / this.numLayers >= 5 ? 1 : 0;
    let y = 0;
    for (const { layers } of this.hosts) {
      layers.forEach(({ attention, ffn }, layer) => {
        const left = edge(layer), wide = edge(layer + 1) - left - gap;
        [attention, ffn].forEach((module, half) => {
          context.fillStyle = module ? color(degreeName(module.here[1])) : color("--empty");
          const top = y + (half * STRIP) / 2;
          if (module) context.fillRect(left, top, wide, STRIP / 2);
          else context.fillRect(left, top + 2, wide, 1);
        });
      });
      y += STRIP + 1;
    }
    y = strips * (STRIP + 1) + GAP;
    const colors = LAYER_PARTS.map((name) => color(COLORS[name]));
    this.layers.forEach((parts, layer) => {
      const left = edge(layer), wide = edge(layer + 1) - left - gap;
      let bottom = y + MAP;
      parts.forEach((size, part) => {
        if (!size) return;
        // A used part is never too thin to see.
        const tall = Math.max((size * MAP) / this.largest, part === 2 ? 1 : 0);
        context.fillStyle = colors[part];
        context.fillRect(left, bottom - tall, wide, tall);
        bottom -= tall;
      });
    });
    context.fillStyle = color("--line");
    context.fillRect(0, y + MAP, width, 1);
    const total = this.parts.reduce((sum, size) => sum + size, 0) || 1;
    let sum = 0;
    DEVICE_PARTS.forEach((name, part) => {
      context.fillStyle = color(COLORS[name]);
      const left = (sum * width) / total;
      sum += this.parts[part];
      context.fillRect(left, y + MAP + GAP, (sum * width) / total - left, BAR);
    });
    if (this.layer !== null) {
      context.strokeStyle = color("--text");
      context.lineWidth = 1;
      context.strokeRect(edge(this.layer) - 0.5, 0.5, edge(this.layer + 1) - edge(this.layer), y + MAP - 0.5);
    }
  }
}

// Size a canvas for the density of the screen. Return its context, scaled to CSS pixels, and its width.
function prepare(canvas, height) {
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(canvas);
  const width = canvas.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d");
  context.scale(density, density);
  return { context, width };
}

export class Cluster {
  constructor() {
    this.root = document.getElementById("instances");
    this.axis = document.getElementById("axis");
    this.readout = document.getElementById("readout");
    this.hint = this.readout.textContent;
    this.devices = new Map();
    this.structure = "";
    new ResizeObserver(() => this.redraw()).observe(this.root);
  }

  update(state) {
    const hosts = hosted(state);
    const structure = JSON.stringify([state.instances.map(({ id, devices }) => [id, devices]), state.devices.length]);
    if (structure !== this.structure) {
      this.structure = structure;
      this.build(state);
    }
    for (const instance of state.instances) this.describe(instance, state);
    this.numLayers = state.num_layers;
    const totals = state.devices.flatMap((device) => device.layers.map((sizes) => sizes.reduce((sum, size) => sum + size, 0)));
    const largest = Math.max(...totals, 1);
    for (const device of state.devices) {
      this.devices.get(device.device).update(device, hosts[device.device], state.num_layers, largest);
    }
    this.drawAxis();
    this.updateLegend(state);
  }

  build(state) {
    const focused = document.activeElement;
    this.heads = new Map();
    this.root.replaceChildren();
    const free = new Set(state.devices.map(({ device }) => device));
    const add = (devices, head) => {
      const box = element("div", "", "instance");
      box.append(head);
      for (const number of devices) {
        free.delete(number);
        if (!this.devices.has(number)) {
          this.devices.set(number, new Device(number, (text) => { this.readout.textContent = text ?? this.hint; }));
        }
        box.append(this.devices.get(number).root);
      }
      this.root.append(box);
      return box;
    };
    for (const instance of [...state.instances].sort((a, b) => a.devices[0] - b.devices[0])) {
      const head = element("div", "", "head");
      const parts = {
        title: head.appendChild(element("h3")),
        degree: head.appendChild(element("span", "", "degree")),
        phase: head.appendChild(element("span", "", "phase")),
        numbers: head.appendChild(element("span", "", "numbers")),
      };
      this.heads.set(instance.id, parts);
      add(instance.devices, head).dataset.instance = instance.id;
    }
    if (free.size) {
      const head = element("div", "", "head");
      head.append(element("h3", "No instance"));
      add([...free], head);
    }
    if (this.root.contains(focused)) focused.focus();
  }

  describe(instance, state) {
    const { title, degree, phase, numbers } = this.heads.get(instance.id);
    title.textContent = `Instance ${instance.id}`;
    degree.textContent = `TP${instance.degree}`;
    degree.style.background = `var(${degreeName(instance.degree)})`;
    const concerns = ({ kind, devices, instance: number }) => (kind === "transform" ? devices.some((it) => instance.devices.includes(it)) : number === instance.id);
    const change = state.changes.find((each) => each.layers && concerns(each));
    const switched = change ? `, ${change.switched} of ${change.layers} layers` : "";
    phase.textContent = instance.phase === "serving" && !change ? "" : `${change?.state ?? instance.phase}${switched}`;
    const used = instance.kv_total_pages ? Math.round((100 * instance.kv_used_pages) / instance.kv_total_pages) : 0;
    const paused = instance.paused ? `, ${instance.paused} paused (TP${instance.paused_degree})` : "";
    numbers.textContent = `${instance.running} running${paused}, KV cache ${used}%`;
    numbers.title = `${instance.kv_used_pages} of ${instance.kv_total_pages} pages in use, ${instance.kv_cached_pages} kept for prefixes`;
  }

  updateLegend(state) {
    const degrees = new Set(state.instances.flatMap(({ runs }) => runs.flatMap(({ homes }) => homes.map(([, degree]) => degree))));
    const present = DEVICE_PARTS.filter((_, part) => [...this.devices.values()].some((device) => device.parts?.[part] > 0));
    const items = [
      ...[...degrees].sort((a, b) => a - b).map((degree) => [`TP${degree}`, degreeName(degree)]),
      ...present.map((name) => [name, COLORS[name]]),
    ];
    const key = JSON.stringify(items);
    if (key === this.legendKey) return;
    this.legendKey = key;
    document.getElementById("legend").replaceChildren(...items.map(([name, variable]) => {
      const item = element("li");
      const swatch = item.appendChild(element("i"));
      swatch.style.background = `var(${variable})`;
      item.append(name);
      return item;
    }));
  }

  drawAxis() {
    const { context, width } = prepare(this.axis, 14);
    if (!width || !this.numLayers) return;
    const one = width / this.numLayers;
    const step = [1, 2, 5, 10, 20, 50].find((each) => each * one >= 22) ?? 100;
    context.fillStyle = color("--dim");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    for (let layer = 0; layer < this.numLayers; layer += step) context.fillText(`${layer}`, (layer + 0.5) * one, 11);
  }

  redraw() {
    for (const device of this.devices.values()) if (device.device && device.root.isConnected) device.draw();
    this.drawAxis();
  }
}
