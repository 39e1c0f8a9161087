// Which part of the picture is seen: panning, zooming, and the little map.

const view = (() => {
  const svg = document.getElementById("graph");
  const world = document.getElementById("world");
  const map = document.getElementById("map");
  const [SMALLEST, LARGEST] = [0.02, 4];
  let [x, y, scale] = [0, 0, 1];
  let drawing = { width: 1, height: 1, boxes: [] };
  let current = null; // the item that the map marks
  let fitted = null; // how it was fitted, as long as nothing has moved it since

  // What to show once there is room: a notebook's frame has no size when its script begins, and a
  // hidden one none at all.
  const waiting = [];

  const size = () => svg.getBoundingClientRect();

  const whenMeasured =
    (show) =>
    (...args) => {
      const { width, height } = size();
      if (width && height) show(...args);
      else waiting.push(() => show(...args));
    };

  function apply() {
    world.setAttribute(
      "transform",
      `translate(${round(x)},${round(y)}) scale(${scale.toFixed(4)})`,
    );
    drawMap();
  }

  function zoom(factor, point) {
    fitted = null;
    const { width, height } = size();
    const [px, py] = point ?? [width / 2, height / 2];
    const next = Math.min(LARGEST, Math.max(SMALLEST, scale * factor));
    x = px - ((px - x) * next) / scale;
    y = py - ((py - y) * next) / scale;
    scale = next;
    apply();
  }

  function pan(dx, dy) {
    fitted = null;
    x += dx;
    y += dy;
    apply();
  }

  // Everything, but not so small that nothing can be read if `least` is given: then the beginning.
  function fit(least = SMALLEST) {
    fitted = least;
    const { width, height } = size();
    const margin = 24;
    const whole = Math.min(
      (width - 2 * margin) / drawing.width,
      (height - 2 * margin) / drawing.height,
      1.2,
    );
    scale = Math.max(whole, least, SMALLEST);
    x = (width - drawing.width * scale) / 2;
    if (x < margin && drawing.boxes.length) {
      // Too wide: where the run begins is in the middle, as far as that leaves nothing bare.
      const [first] = drawing.boxes;
      const bare = width - margin - drawing.width * scale;
      x = Math.min(margin, Math.max(bare, width / 2 - (first.x + first.w / 2) * scale));
    }
    y = Math.max(margin, (height - drawing.height * scale) / 2);
    if (drawing.height * scale > height) y = margin;
    apply();
  }

  function centre(item) {
    const box = drawing.boxes.find((each) => each.item === item);
    if (!box) return;
    fitted = null;
    const { width, height } = size();
    if (scale < 0.6) scale = 0.9;
    x = width / 2 - (box.x + box.w / 2) * scale;
    // A tall box is shown from its head on.
    y = Math.max(height / 2 - (box.y + box.h / 2) * scale, 40 - box.y * scale);
    if (box.h * scale < height - 80) y = height / 2 - (box.y + box.h / 2) * scale;
    apply();
  }

  function isSeen(box) {
    const { width, height } = size();
    const [left, top] = [box.x * scale + x, box.y * scale + y];
    return (
      left > 8 &&
      top > 8 &&
      left + Math.min(box.w * scale, width / 2) < width - 8 &&
      top + Math.min(box.h * scale, height / 2) < height - 8
    );
  }

  function reveal(item) {
    const box = drawing.boxes.find((each) => each.item === item);
    if (box && !isSeen(box)) centre(item);
  }

  const onScreen = (box) => [box.x * scale + x, box.y * scale + y];

  function drawMap() {
    const [room, tall] = [map.width, map.height];
    const { width, height } = size();
    const whole =
      x >= 0 &&
      y >= 0 &&
      x + drawing.width * scale <= width &&
      y + drawing.height * scale <= height;
    map.hidden = whole || width < 640;
    if (map.hidden) return;
    const context = map.getContext("2d");
    const style = getComputedStyle(map);
    const ratio = Math.min((room - 8) / drawing.width, (tall - 8) / drawing.height);
    const [left, top] = [(room - drawing.width * ratio) / 2, (tall - drawing.height * ratio) / 2];
    context.clearRect(0, 0, room, tall);
    const rectangle = (box) => [
      left + box.x * ratio,
      top + box.y * ratio,
      Math.max(1, box.w * ratio),
      Math.max(1, box.h * ratio),
    ];
    for (const box of drawing.boxes) {
      const isCurrent = box.item === current;
      context.globalAlpha = box.isFrame ? 0.12 : isCurrent ? 1 : 0.5;
      context.fillStyle = style.getPropertyValue(isCurrent ? "--accent" : "--ink");
      context.fillRect(...rectangle(box));
    }
    context.globalAlpha = 1;
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 1.5;
    const seen = { x: -x / scale, y: -y / scale, w: width / scale, h: height / scale };
    context.strokeRect(...rectangle(seen));
    map.toWorld = (px, py) => [(px - left) / ratio, (py - top) / ratio];
  }

  function show(next, item) {
    drawing = next;
    current = item;
    drawMap();
  }

  svg.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : 1;
      if (event.shiftKey) {
        pan(-(event.deltaX || event.deltaY) * unit, 0);
        return;
      }
      const { left, top } = size();
      const step = Math.max(-120, Math.min(120, event.deltaY * unit));
      zoom(Math.exp(-step * (event.ctrlKey ? 0.01 : 0.002)), [
        event.clientX - left,
        event.clientY - top,
      ]);
    },
    { passive: false },
  );

  // One pointer moves the picture, two stretch it.
  const pointers = new Map();
  let moved = 0;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (pointers.size === 1) moved = 0;
  });
  addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    pointers.set(event.pointerId, now);
    moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    if (moved < 5) return;
    svg.classList.add("moving");
    if (pointers.size === 1) {
      pan(now[0] - before[0], now[1] - before[1]);
    } else {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const span = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]);
      const { left, top } = size();
      const middle = [(now[0] + other[0]) / 2 - left, (now[1] + other[1]) / 2 - top];
      pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
      if (span(before) > 1) zoom(span(now) / span(before), middle);
    }
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) svg.classList.remove("moving");
  };
  addEventListener("pointerup", release);
  addEventListener("pointercancel", release);

  let onMap = false;
  const jump = (event) => {
    const box = map.getBoundingClientRect();
    const [wx, wy] = map.toWorld(event.clientX - box.left, event.clientY - box.top);
    const { width, height } = size();
    x = width / 2 - wx * scale;
    y = height / 2 - wy * scale;
    fitted = null;
    apply();
  };
  map.addEventListener("pointerdown", (event) => {
    onMap = true;
    map.setPointerCapture(event.pointerId);
    jump(event);
  });
  map.addEventListener("pointermove", (event) => onMap && jump(event));
  map.addEventListener("pointerup", () => (onMap = false));
  new ResizeObserver(() => {
    const { width, height } = size();
    if (!width || !height) return;
    for (const show of waiting.splice(0)) show();
    if (fitted === null) drawMap();
    else fit(fitted);
  }).observe(svg.parentElement);

  return {
    apply,
    zoom,
    pan,
    fit: whenMeasured(fit),
    centre: whenMeasured(centre),
    reveal: whenMeasured(reveal),
    onScreen,
    show,
    wasMoved: () => moved >= 5,
  };
})();
