// A page that was opened from a folder may start no worker: there the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = data => this.answer(data);
      this.loaded = new Promise(resolve => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = resolve;
        frame.contentDocument.body.append(script);
      });
    }

    answer(data) {
      const event = new MessageEvent("message", {data});
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", {data})));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
